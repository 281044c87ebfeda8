"""Which instance served a user last: where prefixes of that user may be.

A router that is alone sees every request, so it may place a user of whom nothing is kept where the
least work waits, and send the user there again. Several routers cannot: they agree by hashing.
Touch this when users are remembered in another way.
"""

from collections import OrderedDict

MAX_PLACED = 262_144


class Placements:
    """The instances of the users served most recently, within a bounded number of users."""

    def __init__(self, max_users: int = MAX_PLACED) -> None:
        self.max_users = max_users
        self._names: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._names)

    def note(self, user: str, instance: str) -> None:
        """Remember that an instance served a user."""
        self._names[user] = instance
        self._names.move_to_end(user)
        if len(self._names) > self.max_users:
            self._names.popitem(last=False)

    def get(self, user: str) -> str | None:
        """Return the name of the instance that served a user last, None where nobody knows."""
        return self._names.get(user)
