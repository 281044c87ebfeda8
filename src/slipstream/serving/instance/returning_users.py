"""How many ranking requests come from users who were here before: what a kept prefix is worth.

A prefix that a ranking leaves behind pays only when its user comes back while it could still be
there. So users are remembered as long as the tiers have room for prefixes of theirs, whether one is
kept or not, and the share of requests from remembered users tells what keeping will bring. Touch
this when keeping is decided by something else.
"""

from collections import OrderedDict

FIRST_REQUESTS, FIRST_SHARE = 32.0, 0.5  # what is taken for seen at the start
HORIZON = 512.0  # requests over which the share is taken


class ReturningUsers:
    """The users of recent rankings, within the bytes that prefixes of theirs would take."""

    def __init__(self, room: int) -> None:
        self._room, self._bytes = room, 0
        self._users: OrderedDict[str, int] = OrderedDict()
        self._requests, self._returned = FIRST_REQUESTS, FIRST_REQUESTS * FIRST_SHARE

    @property
    def share(self) -> float:
        """The share of requests whose user was here before; older ones fade."""
        return self._returned / self._requests

    def note(self, user: str, nbytes: int) -> None:
        """Note a ranking request of a user whose prefix takes so many bytes."""
        fade = 1.0 - 1.0 / HORIZON
        before = self._users.pop(user, None)
        self._requests = fade * self._requests + 1.0
        self._returned = fade * self._returned + (before is not None)
        self._bytes += nbytes - (before or 0)
        self._users[user] = nbytes
        while self._bytes > self._room:
            self._bytes -= self._users.popitem(last=False)[1]

    def forget(self, user: str) -> None:
        """Forget a user."""
        self._bytes -= self._users.pop(user, 0)
