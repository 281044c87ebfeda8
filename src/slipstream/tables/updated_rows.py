"""Which rows were updated since a checkpoint took them: one byte per row, set in the hot path.

Touch this when incremental checkpoints must know something more about a row.
"""

from collections.abc import Iterator

import numpy as np
import torch

from slipstream.tables.memory_pages import lazy_zeros

_PART = 1 << 20  # rows looked at at a time
_SINCE, _EVER = 1, 2  # bits of a mark: since the marks were taken, and ever


class UpdatedRows:
    """Marks of the rows in places 0 … count - 1; memory is used only where rows are marked."""

    def __init__(self, count: int) -> None:
        self._map_N = lazy_zeros(count, dtype=torch.uint8)

    def mark(self, places_U: torch.Tensor) -> None:
        """Mark rows, marked before or not."""
        # One thread: too little work for more.
        self._map_N.numpy()[places_U.numpy()] = _SINCE | _EVER

    def mark_first(self, count: int) -> None:
        """Mark the first `count` rows."""
        self._map_N[:count] = _SINCE | _EVER

    @property
    def count(self) -> int:
        """How many rows were marked since the marks were taken."""
        parts = (self._map_N.numpy()[begin:end] for begin, end in self._parts())
        return sum(int(np.count_nonzero(part & _SINCE)) for part in parts)

    def take(self, *, ever: bool = False) -> np.ndarray:
        """Return the marks since the last call, or all there ever were: one bool per row."""
        taken_N: np.ndarray = lazy_zeros(len(self._map_N), dtype=torch.bool).numpy()
        for begin, end in self._parts():
            part = self._map_N.numpy()[begin:end]
            if part.any():
                taken_N[begin:end] = part & (_EVER if ever else _SINCE)
                part &= _EVER
        return taken_N

    def grow(self, count: int) -> None:
        """Make room for more rows."""
        if count > len(self._map_N):
            larger = lazy_zeros(count, dtype=torch.uint8)
            larger[: len(self._map_N)] = self._map_N
            self._map_N = larger

    def _parts(self) -> Iterator[tuple[int, int]]:
        count = len(self._map_N)
        return ((begin, min(begin + _PART, count)) for begin in range(0, count, _PART))
