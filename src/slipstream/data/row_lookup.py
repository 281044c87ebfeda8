"""Maps original int64 ids to rows with an open-addressing hash table in NumPy arrays.

Touch this when ingest spends its time here: every behaviour of a log needs two lookups. A join or a
binary search is several times slower.
"""

import numpy as np

# Odd, so multiplying by it loses nothing; the top bits of the product mix all bits of the id.
_SPREAD = np.uint64(0x9E3779B97F4A7C15)


class RowLookup:
    """Rows 0, 1, 2 … of distinct ids; at most a quarter of the slots is used."""

    def __init__(self, ids_V: np.ndarray) -> None:
        bits = max(4, (4 * ids_V.size).bit_length())
        self._shift, self._mask = np.uint64(64 - bits), (1 << bits) - 1
        self._rows = np.full(1 << bits, -1, dtype=np.int64)
        self._ids = np.zeros(1 << bits, dtype=np.int64)
        slots, rows = self._slots(ids_V), np.arange(ids_V.size)
        while rows.size:
            free = self._rows[slots] < 0
            self._rows[slots[free]] = rows[free]  # the last of several ids takes a slot
            left = self._rows[slots] != rows
            slots, rows = (slots[left] + 1) & self._mask, rows[left]
        taken = self._rows >= 0
        self._ids[taken] = ids_V[self._rows[taken]]

    def _slots(self, ids: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            mixed = ids.astype(np.int64, copy=False).view(np.uint64) * _SPREAD
            return (mixed >> self._shift).view(np.int64)

    def rows(self, ids_T: np.ndarray) -> np.ndarray:
        """Return the row of every id, -1 for an unknown id."""
        slots_T = self._slots(ids_T)
        rows_T = self._rows[slots_T]
        unsure = np.flatnonzero((self._ids[slots_T] != ids_T) & (rows_T >= 0))
        slots, ids = slots_T[unsure], ids_T[unsure]
        while unsure.size:
            slots = (slots + 1) & self._mask
            rows = self._rows[slots]
            rows_T[unsure] = rows
            going = (self._ids[slots] != ids) & (rows >= 0)
            unsure, slots, ids = unsure[going], slots[going], ids[going]
        return rows_T
