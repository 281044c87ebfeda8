"""Which rankings a client announces: those of histories that gain by it, as the server says.

The trigger refuses a short history anyway; a client that knows its length spares both sides the
request. Touch this when a server tells clients something else about announcements.
"""

from slipstream.serving.clock import SYSTEM_CLOCK, Clock
from slipstream.serving.http import messages as m

REFRESH_SECONDS = 5.0  # after so long one short history is announced, to hear what holds now


class Announcements:
    """What the last answer said, and when; until then every history is worth announcing."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._from_behaviours = 0
        self._told_at = clock.now()

    def note(self, answer: m.PreinferAnswer) -> None:
        """Keep what an answer to an announcement says of lengths."""
        self._from_behaviours, self._told_at = answer.from_behaviours, self._clock.now()

    def worth(self, behaviours: int) -> bool:
        """Return whether to announce the ranking of so many behaviours."""
        if behaviours >= self._from_behaviours:
            return True
        now = self._clock.now()
        if now < self._told_at + REFRESH_SECONDS:
            return False
        self._told_at = now  # one asks, the others wait for its answer
        return True
