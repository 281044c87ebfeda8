"""One feature of all items, as filters and caps read it: labels by code, or numbers.

Touch this when item features get another kind.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa


@dataclass(frozen=True)
class ItemColumn:
    """A feature's column of the vocabulary: numbers, or codes of labels, perhaps several an item.

    The empty label stands for unknown, as in a store.
    """

    numbers_N: np.ndarray | None = None
    codes: np.ndarray | None = None  # with offsets: of all items one after the other
    offsets_N1: np.ndarray | None = None
    labels: tuple[str, ...] = ()

    @classmethod
    def of(cls, column: pa.Array) -> "ItemColumn":
        """Read a column of the vocabulary."""
        if pa.types.is_floating(column.type) or pa.types.is_integer(column.type):
            return cls(np.asarray(column.to_numpy(zero_copy_only=False), dtype=np.float64))
        offsets_N1 = None
        if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
            offsets_N1 = np.asarray(column.offsets.to_numpy(), dtype=np.int64)
            column = column.values
        if not pa.types.is_dictionary(column.type):
            column = column.dictionary_encode()
        codes = column.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        labels = tuple(label or "" for label in column.dictionary.to_pylist())
        return cls(None, codes, offsets_N1, labels)

    @property
    def is_number(self) -> bool:
        return self.numbers_N is not None

    def take(self, rows_C: np.ndarray) -> "ItemColumn":
        """Return the column of some items."""
        if self.numbers_N is not None:
            return ItemColumn(self.numbers_N[rows_C])
        assert self.codes is not None
        if self.offsets_N1 is None:
            return ItemColumn(None, self.codes[rows_C], None, self.labels)
        begins_C, ends_C = self.offsets_N1[rows_C], self.offsets_N1[rows_C + 1]
        parts = [self.codes[begin:end] for begin, end in zip(begins_C, ends_C, strict=True)]
        codes = np.concatenate([*parts, self.codes[:0]])
        offsets_C1 = np.concatenate([[0], np.cumsum(ends_C - begins_C)])
        return ItemColumn(None, codes, offsets_C1, self.labels)

    def within(self, least: float | None, most: float | None) -> np.ndarray:
        """Return which items have a number from `least` to `most`."""
        assert self.numbers_N is not None
        found_N: np.ndarray = ~np.isnan(self.numbers_N)
        if least is not None:
            found_N &= self.numbers_N >= least
        if most is not None:
            found_N &= self.numbers_N <= most
        return found_N

    def has_one_of(self, wanted: Iterable[str]) -> np.ndarray:
        """Return which items have at least one of these labels."""
        assert self.codes is not None
        chosen = set(wanted) - {""}
        by_code = np.array([label in chosen for label in self.labels] + [False])  # -1: the last
        hits: np.ndarray = by_code[self.codes]
        if self.offsets_N1 is not None:
            before = np.concatenate([[0], np.cumsum(hits)])
            hits = before[self.offsets_N1[1:]] > before[self.offsets_N1[:-1]]
        return hits

    def labels_by_item(self) -> list[tuple[Any, ...]]:
        """Return every item's labels, or its number; none where it is not known."""
        if self.numbers_N is not None:
            return [() if number != number else (number,) for number in self.numbers_N.tolist()]
        assert self.codes is not None
        named = [self.labels[code] if code >= 0 else "" for code in self.codes.tolist()]
        if self.offsets_N1 is None:
            return [(label,) if label else () for label in named]
        ends = self.offsets_N1.tolist()
        return [
            tuple(label for label in named[begin:end] if label)
            for begin, end in itertools.pairwise(ends)
        ]
