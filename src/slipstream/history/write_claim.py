"""Whether a write is committed, or withdrawn by a caller who waits no longer: one of the two.

So an append that was answered with an error is not stored later. Touch this when a write can end in
another way.
"""

import threading


class WriteClaim:
    """Decides once whether a write is committed or withdrawn by its caller."""

    def __init__(self) -> None:
        self._lock, self._decision = threading.Lock(), ""

    def commit(self) -> None:
        """Decide to commit; `WithdrawnError` where the caller was faster."""
        self._decide("committed")
        self.check()

    def withdraw(self) -> bool:
        """Decide to give the write up; False where it is being committed."""
        self._decide("withdrawn")
        return self._decision == "withdrawn"

    def check(self) -> None:
        """Raise `WithdrawnError` where the caller has given the write up."""
        if self._decision == "withdrawn":
            raise WithdrawnError

    def _decide(self, decision: str) -> None:
        with self._lock:
            self._decision = self._decision or decision


class WithdrawnError(Exception):
    """The caller of a write waits no longer, so it is rolled back."""
