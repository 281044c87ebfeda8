"""The rows of a disk table that are in memory: weights and state in slots, updated in place.

Touch this when eviction from the cache changes. The cache does not know about files. It finds rows,
gives slots to new rows and chooses the rows to evict. The caller writes dirty rows to the files
before it releases their slots.
"""

import numpy as np
import torch

from slipstream.errors import SlipstreamError
from slipstream.tables.embedding_table import Rows
from slipstream.tables.eviction import SHARE, smallest
from slipstream.tables.hash_index import make_index
from slipstream.tables.memory_pages import lazy_zeros
from slipstream.tables.row_optimizers import RowOptimizer, State

_SLOT_OVERHEAD = 8 + 8 + 1 + 64  # bytes: number, clock, dirty mark, index at its largest
_FEWEST = 16


class RowCache:
    """At most `budget` bytes of rows, identified by their numbers."""

    def __init__(
        self,
        name: str,
        budget: int,
        record_bytes: int,
        optimizer: RowOptimizer,
        dim: int,
        dtype: torch.dtype,
    ) -> None:
        self.capacity = budget // (record_bytes + _SLOT_OVERHEAD)
        if self.capacity < _FEWEST:
            raise SlipstreamError(
                f"tables.cache_bytes={budget} holds fewer than {_FEWEST} rows of table '{name}' "
                f"({record_bytes + _SLOT_OVERHEAD} bytes each); raise it"
            )
        self.weights_CD = lazy_zeros(self.capacity, dim, dtype=dtype)
        state = optimizer.new_state(self.capacity, dim, dtype, lazy_zeros)
        self.state: State = {entry: value for entry, value in state.items() if value.dim() > 0}
        self.dirty_C = torch.zeros(self.capacity, dtype=torch.bool)
        self._number_C = torch.full((self.capacity,), -1, dtype=torch.int64)
        self._used_C = torch.zeros(self.capacity, dtype=torch.int64)  # clock of last use
        self._index = make_index(self.capacity)
        self._free_C = torch.zeros(0, dtype=torch.int64)
        self._next = 0
        self.clock = 0

    def __len__(self) -> int:
        return len(self._index)

    def find(self, numbers_U: torch.Tensor) -> torch.Tensor:
        """Return the slot of each row, -1 where it is not in memory."""
        return self._index.find(numbers_U)

    def use(self, slots_U: torch.Tensor) -> None:
        """Record that these slots are used at the present clock."""
        self._used_C[slots_U] = self.clock

    def rows(self, slots_U: torch.Tensor) -> Rows:
        """Copy the rows in these slots."""
        return Rows(
            self.weights_CD.index_select(0, slots_U),
            {entry: value.index_select(0, slots_U) for entry, value in self.state.items()},
        )

    def choose_evicted(self, needed: int) -> torch.Tensor:
        """Choose the slots to release before `needed` new rows fit: the longest unused, if any."""
        short = needed - (len(self._free_C) + self.capacity - self._next)
        if short <= 0:
            return torch.zeros(0, dtype=torch.int64)
        unused = ((self._number_C >= 0) & (self._used_C < self.clock)).nonzero().squeeze(1)
        if unused.numel() < short:
            raise ValueError(f"{needed} rows cannot enter a cache of {self.capacity} at once")
        least = smallest(
            max(short, self.capacity // SHARE),
            self._used_C[unused].numpy(),
            self._number_C[unused].numpy(),
        )
        return unused[torch.from_numpy(least)]

    def numbers(self, slots_U: torch.Tensor) -> np.ndarray:
        """Return the numbers of the rows in these slots."""
        return self._number_C[slots_U].numpy()

    def release(self, slots_U: torch.Tensor) -> None:
        """Free these slots."""
        if not slots_U.numel():
            return
        self._index.erase(self._number_C[slots_U])
        self._number_C[slots_U] = -1
        self.dirty_C[slots_U] = False
        self._free_C = torch.cat([self._free_C, slots_U])

    def allocate(self, numbers_U: torch.Tensor) -> torch.Tensor:
        """Return slots for rows that are not in memory; the caller has made room for them."""
        reused, self._free_C = self._free_C[: numbers_U.numel()], self._free_C[numbers_U.numel() :]
        fresh = torch.arange(self._next, self._next + numbers_U.numel() - reused.numel())
        self._next += fresh.numel()
        slots_U = torch.cat([reused, fresh])
        self._index.insert(numbers_U, slots_U)
        self._number_C[slots_U], self._used_C[slots_U] = numbers_U, self.clock
        self.dirty_C[slots_U] = False
        return slots_U

    def put(self, slots_U: torch.Tensor, rows: Rows) -> None:
        """Set the contents of these slots."""
        self.weights_CD[slots_U] = rows.weights_UD
        for entry, value in self.state.items():
            value[slots_U] = rows.state[entry]

    def dirty_slots(self) -> torch.Tensor:
        """Return the slots whose rows differ from the files, ascending by number."""
        slots = self.dirty_C.nonzero().squeeze(1)
        return slots[self._number_C[slots].argsort()]

    def clear(self) -> None:
        """Release every slot, without writing back."""
        self.release((self._number_C >= 0).nonzero().squeeze(1))
