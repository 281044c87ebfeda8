"""Which instance served a user last: where prefixes of that user are, or at least its history.

A router that is alone sees every request, so it may place a user of whom nothing is kept where the
least work waits, and send the user there again. Several routers cannot: they agree by hashing.
Touch this when users are remembered in another way.
"""

from collections import OrderedDict
from dataclasses import dataclass

MAX_PLACED = 262_144


@dataclass(frozen=True)
class UserPlacement:
    """The instance that served a user, and whether it kept a prefix."""

    name: str
    kept: bool


class Placements:
    """The instances of the users served most recently, within a bounded number of users."""

    def __init__(self, max_users: int = MAX_PLACED) -> None:
        self.max_users = max_users
        self._placements: OrderedDict[str, UserPlacement] = OrderedDict()

    def __len__(self) -> int:
        return len(self._placements)

    def note(self, user: str, instance: str, kept: bool = True) -> None:
        """Remember that an instance served a user; one that kept nothing replaces none that did."""
        before = self._placements.get(user)
        if kept or before is None or not before.kept or before.name == instance:
            self._placements[user] = UserPlacement(instance, kept)
        self._placements.move_to_end(user)
        if len(self._placements) > self.max_users:
            self._placements.popitem(last=False)

    def get(self, user: str) -> UserPlacement | None:
        """Return where a user was served last, None where nobody knows."""
        return self._placements.get(user)
