"""What a user did: one type from the wire to the model. Touch this to add a field."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np


@dataclass(frozen=True)
class History:
    """Behaviours `[first, total)` of a user, oldest first, in the caller's own terms.

    `items` are original ids and `timestamps` whole numbers; `actions` holds one column per action,
    `user_features` the values of the user features a bundle was trained with: a label or a code, a
    list of them, or a number (an absent one counts as not known). Messages and stores give numpy
    arrays (int64 or text ids, int64 times, float32 actions); the engine also takes lists and checks
    them.
    """

    items: Any
    timestamps: Any
    actions: Mapping[str, Any] = field(default_factory=dict)
    user_features: Mapping[str, Any] = field(default_factory=dict)
    first: int = 0  # the number of the oldest behaviour, counted from the first one ever stored

    def __len__(self) -> int:
        return len(self.items)

    @property
    def total(self) -> int:
        """The number behind the newest behaviour: how many were ever stored for this user."""
        return self.first + len(self)

    def part(self, begin: int, end: int) -> "History":
        """Return behaviours `[begin, end)` by their number."""
        cut = slice(begin - self.first, end - self.first)
        return replace(self._select(cut), first=begin)

    def where(self, kept_T: np.ndarray) -> "History":
        """Return the behaviours whose place in `kept_T` is true."""
        return self if kept_T.all() else self._select(kept_T)

    def then(self, later: "History") -> "History":
        """Return these behaviours followed by later ones; an absent action counts as 0."""
        if not len(self):
            return replace(later, first=self.total)
        both = join_histories([self, later])
        return replace(self, items=both.items, timestamps=both.timestamps, actions=both.actions)

    def _select(self, places: slice | np.ndarray) -> "History":
        actions = {name: values[places] for name, values in self.actions.items()}
        return replace(
            self, items=self.items[places], timestamps=self.timestamps[places], actions=actions
        )


def join_histories(parts: Sequence[History]) -> History:
    """Return one history of parts that follow each other; an absent action counts as 0."""
    names = dict.fromkeys(name for part in parts for name in part.actions)

    def column(name: str, part: History) -> np.ndarray:
        values = part.actions.get(name)
        return np.zeros(len(part), dtype=np.float32) if values is None else values

    return History(
        np.concatenate([part.items for part in parts]),
        np.concatenate([part.timestamps for part in parts]),
        {name: np.concatenate([column(name, part) for part in parts]) for name in names},
        first=parts[0].first,
    )
