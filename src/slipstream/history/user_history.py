"""What a user did: one type from the wire to the model. Touch this to add a field."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

NOT_KNOWN = np.array([""], dtype=object)  # the label of context that is not known


@dataclass(frozen=True)
class History:
    """Behaviours `[first, total)` of a user, oldest first, in the caller's own terms.

    `items` are original ids and `timestamps` whole numbers; `actions` holds one column per action,
    `user_features` the values of the user features a bundle was trained with: a label or a code, a
    list of them, or a number (an absent one counts as not known). `context` holds one column of
    labels per context column, such as device and surface; an empty label is not known. Messages and
    stores give numpy arrays (int64 or text ids, int64 times, float32 actions, text labels); the
    engine also takes lists and checks them.
    """

    items: Any
    timestamps: Any
    actions: Mapping[str, Any] = field(default_factory=dict)
    user_features: Mapping[str, Any] = field(default_factory=dict)
    first: int = 0  # the number of the oldest behaviour, counted from the first one ever stored
    context: Mapping[str, Any] = field(default_factory=dict)
    # Of a stored history: the same object while what is stored stays the same. With `first` and the
    # length it tells which behaviours these are.
    source: object = field(default=None, compare=False, repr=False)

    def __len__(self) -> int:
        return len(self.items)

    @property
    def total(self) -> int:
        """The number behind the newest behaviour: how many were ever stored for this user."""
        return self.first + len(self)

    def part(self, begin: int, end: int) -> "History":
        """Return behaviours `[begin, end)` by their number."""
        if (begin, end) == (self.first, self.total):
            return self
        cut = slice(begin - self.first, end - self.first)
        return replace(self._select(cut), first=begin)

    def where(self, kept_T: np.ndarray) -> "History":
        """Return the behaviours whose place in `kept_T` is true."""
        return self if kept_T.all() else replace(self._select(kept_T), source=None)

    def then(self, later: "History") -> "History":
        """Return these behaviours followed by later ones; an absent action counts as 0."""
        if not len(self):
            return replace(later, first=self.total)
        both = join_histories([self, later])
        return replace(both, user_features=self.user_features)

    def _select(self, places: slice | np.ndarray) -> "History":
        return replace(
            self,
            items=self.items[places],
            timestamps=self.timestamps[places],
            actions={name: values[places] for name, values in self.actions.items()},
            context={name: labels[places] for name, labels in self.context.items()},
        )


def join_histories(parts: Sequence[History]) -> History:
    """Return one history of parts that follow each other.

    An absent action counts as 0, absent context as not known.
    """
    return History(
        np.concatenate([part.items for part in parts]),
        np.concatenate([part.timestamps for part in parts]),
        _join_columns(parts, [part.actions for part in parts], np.zeros(1, dtype=np.float32)),
        context=_join_columns(parts, [part.context for part in parts], NOT_KNOWN),
        first=parts[0].first,
    )


def _join_columns(
    parts: Sequence[History], columns: Sequence[Mapping[str, Any]], absent: np.ndarray
) -> dict[str, np.ndarray]:
    """Return each column end to end; a part that lacks one has `absent` everywhere."""
    names = dict.fromkeys(name for each in columns for name in each)
    return {
        name: np.concatenate(
            [
                each.get(name, np.repeat(absent, len(part)))
                for part, each in zip(parts, columns, strict=True)
            ]
        )
        for name in names
    }
