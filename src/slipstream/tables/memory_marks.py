"""One bit per row: whether a memory table has set the row's first value.

Touch this together with the native gather, which reads the same bits. The bits stay in the
processor's cache while gigabytes of rows are read.
"""

import numpy as np
import torch

from slipstream.tables.memory_pages import lazy_zeros


class RowMarks:
    """Marks of rows 0 … count - 1, in `bits` (uint8, lowest bit first)."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.bits = lazy_zeros(-(-count // 8), dtype=torch.uint8)

    def mark(self, rows_U: torch.Tensor) -> None:
        """Mark rows, marked before or not."""
        rows = rows_U.numpy()
        np.bitwise_or.at(self.bits.numpy(), rows >> 3, np.left_shift(1, rows & 7).astype(np.uint8))

    def mark_all(self) -> None:
        """Mark every row."""
        self.bits.fill_(255)

    def unmarked(self, rows_U: torch.Tensor) -> torch.Tensor:
        """Return which of these rows are not marked, as bool."""
        rows = rows_U.numpy()
        return torch.from_numpy(((self.bits.numpy()[rows >> 3] >> (rows & 7)) & 1) == 0)

    def marked(self) -> torch.Tensor:
        """Return all marked rows, ascending."""
        return torch.from_numpy(
            np.flatnonzero(np.unpackbits(self.bits.numpy(), count=self.count, bitorder="little"))
        )

    def extended(self, count: int) -> "RowMarks":
        """Return the same marks with room for more rows."""
        larger = RowMarks(count)
        larger.mark(self.marked())
        return larger
