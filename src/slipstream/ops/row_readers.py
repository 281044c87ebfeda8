"""Rows that are read in parts: a tensor in memory, a mapped file, a table larger than memory.

A search asks a reader for tiles of rows from the first to the last, or for single rows, so nothing
as large as all rows need be held. Touch this to search rows that lie somewhere else.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
import torch.nn.functional as F

TILE = 65_536  # rows read at once
NORM_FLOOR = 1e-6  # a row shorter than this is divided by it instead of by its length
RowTile = tuple[int, torch.Tensor]  # number of the first row, rows [C, D]


class RowReader(Protocol):
    """N rows of width D, to read only."""

    @property
    def shape(self) -> tuple[int, int]:
        """N and D."""
        ...

    def take(self, rows_C: torch.Tensor) -> torch.Tensor:
        """Return the rows `rows_C` [C, D]; they may come in any order and repeat."""
        ...

    def tiles(self) -> Iterator[RowTile]:
        """Yield all rows, tile by tile, ascending."""
        ...


class TensorRows:
    """The rows of a tensor, which may be mapped from a file."""

    def __init__(self, rows_ND: torch.Tensor) -> None:
        self.rows_ND = rows_ND

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows_ND.shape[0], self.rows_ND.shape[1]

    def take(self, rows_C: torch.Tensor) -> torch.Tensor:
        return self.rows_ND[rows_C]

    def tiles(self) -> Iterator[RowTile]:
        for begin in range(0, len(self.rows_ND), TILE):
            yield begin, self.rows_ND[begin : begin + TILE]


class NormalizedRows:
    """Another reader's rows, divided by their lengths as they are read."""

    def __init__(self, rows: RowReader) -> None:
        self._rows = rows

    @property
    def shape(self) -> tuple[int, int]:
        return self._rows.shape

    def take(self, rows_C: torch.Tensor) -> torch.Tensor:
        return normalize_rows(self._rows.take(rows_C))

    def tiles(self) -> Iterator[RowTile]:
        for begin, rows_CD in self._rows.tiles():
            yield begin, normalize_rows(rows_CD)


def normalize_rows(rows_CD: torch.Tensor) -> torch.Tensor:
    """Divide each row by its length; a row's result does not depend on the others."""
    return F.normalize(rows_CD, dim=-1, eps=NORM_FLOOR)
