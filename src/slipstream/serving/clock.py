"""The clock that every policy of serving reads: scheduler, trigger, cache, cost model, router.

Each takes a clock at its construction and asks nothing else for the time, so a simulation or a
test runs these very classes by handing over a clock of its own. Touch this when a policy needs
another kind of time.
"""

import time


class Clock:
    """The machine's clock; a subclass may tell any other time."""

    def now(self) -> float:
        """Return seconds that never go back, from an arbitrary start: for deadlines and rates."""
        return time.monotonic()

    def wall_time(self) -> float:
        """Return seconds since 1970, which other processes and later starts agree on."""
        return time.time()


SYSTEM_CLOCK = Clock()
