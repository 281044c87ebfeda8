"""Slices of keys: which rank owns a key, and how a rank numbers the keys it owns.

Touch this when sharding changes; stored tables and checkpoints depend on `slice_of`. Every key
belongs to one of 65,536 slices by a fixed mix of its bits. A rank owns a contiguous range of
slices; another number of ranks is another `Placement`. `SliceLayout` numbers the keys of a range of
slices without gaps (about a fifth of a byte per key): a rank allocates only its part of a table.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from slipstream.ops.counter_random import mix64

SLICES = 1 << 16
_CHUNK = 1 << 20  # keys handled at a time; a multiple of 64


def slice_of(keys_U: torch.Tensor) -> torch.Tensor:
    """Return the slice of each key, int64 in [0, 65536): the top 16 bits of the mixed key."""
    return (mix64(keys_U) >> 48) & (SLICES - 1)


def slice_order(keys_U: torch.Tensor) -> torch.Tensor:
    """Return the permutation that sorts ascending keys by (slice, key)."""
    return torch.argsort(slice_of(keys_U), stable=True)


@dataclass(frozen=True)
class Placement:
    """Contiguous ranges of slices, one per rank."""

    world: int

    def __post_init__(self) -> None:
        if not 1 <= self.world <= SLICES:
            raise ValueError(f"slices can be shared by 1 … {SLICES} ranks, got {self.world}")

    def slices(self, rank: int) -> tuple[int, int]:
        """Return the first slice of a rank, and the first slice after its last."""
        if not 0 <= rank < self.world:
            raise ValueError(f"ranks are 0 … {self.world - 1}, got {rank}")
        return SLICES * rank // self.world, SLICES * (rank + 1) // self.world

    @cached_property
    def _owners(self) -> torch.Tensor:
        sizes = [high - low for low, high in (self.slices(rank) for rank in range(self.world))]
        return torch.repeat_interleave(torch.arange(self.world), torch.tensor(sizes))

    def owner_of(self, keys_U: torch.Tensor) -> torch.Tensor:
        """Return the rank that owns each key, int64 in the shape of the keys."""
        if self.world == 1:
            return torch.zeros_like(keys_U)
        return self._owners[slice_of(keys_U)]


class SliceLayout:
    """Numbers the keys 0 … num_rows - 1 of the slices low … high - 1, ascending and without gaps.

    One bit per key marks the keys that belong. With a running count per 64 keys, the number of a
    key is one look-up and one population count.
    """

    def __init__(self, num_rows: int, low: int, high: int) -> None:
        if not 0 <= low < high <= SLICES:
            raise ValueError(f"slices must ascend within 0 … {SLICES}, got {low} … {high}")
        self.num_rows, self.low, self.high = num_rows, low, high
        self._bits_W = np.zeros(-(-num_rows // 64), dtype=np.uint64)
        for start in range(0, num_rows, _CHUNK):
            slices_K = slice_of(torch.arange(start, min(start + _CHUNK, num_rows))).numpy()
            packed = np.packbits((slices_K >= low) & (slices_K < high), bitorder="little")
            self._bits_W.view(np.uint8)[start // 8 : start // 8 + len(packed)] = packed
        marked_W = np.bitwise_count(self._bits_W).astype(np.int64)
        self.count = int(marked_W.sum())
        self._before_W = (marked_W.cumsum() - marked_W).astype(np.uint32)

    def locate(self, keys_U: torch.Tensor) -> torch.Tensor:
        """Return the number of each key; every key must belong to the slices."""
        keys = keys_U.numpy().astype(np.uint64)
        words, bit = self._bits_W[keys >> np.uint64(6)], keys & np.uint64(63)
        belongs = (words >> bit) & np.uint64(1)
        if not belongs.all():
            stray = int(keys_U[int(belongs.argmin())])
            raise IndexError(
                f"key {stray} lies in a slice this rank does not own ({self.low} … {self.high - 1})"
            )
        below = (np.uint64(1) << bit) - np.uint64(1)
        return torch.from_numpy(
            self._before_W[keys >> np.uint64(6)].astype(np.int64) + np.bitwise_count(words & below)
        )

    def keys(self) -> torch.Tensor:
        """Return all keys that belong, ascending: the inverse of `locate`."""
        return torch.from_numpy(
            np.flatnonzero(np.unpackbits(self._bits_W.view(np.uint8), bitorder="little"))
        )
