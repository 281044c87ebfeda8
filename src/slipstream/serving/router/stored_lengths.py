"""How long the stored histories of users are, as the answers of instances told a router.

A request for a stored user carries no history, so its length is known from the user's last answer
only. Touch this when a router learns lengths in another way.
"""

from collections import OrderedDict

MAX_USERS = 65_536


class StoredLengths:
    """The behaviours of the users asked for most recently, within a bounded number of users."""

    def __init__(self, max_users: int = MAX_USERS) -> None:
        self.max_users = max_users
        self._lengths: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._lengths)

    def note(self, user: str, behaviours: int) -> None:
        """Keep what an answer said; 0 forgets the user."""
        self._lengths.pop(user, None)
        if behaviours > 0:
            self._lengths[user] = behaviours
        if len(self._lengths) > self.max_users:
            self._lengths.popitem(last=False)

    def get(self, user: str, default: int) -> int:
        """Return the user's behaviours, `default` where nothing is known."""
        return self._lengths.get(user, default)
