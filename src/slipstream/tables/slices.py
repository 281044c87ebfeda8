"""Virtual slices: which rank owns a key, and where the keys of some slices lie when only those are stored.

Every key belongs to one of 65,536 slices by a fixed mix of its bits; a rank owns a contiguous range of slices. Another number of
ranks is only another `Placement`. `SliceLayout` numbers the keys of chosen slice ranges without gaps, in about a fifth of a byte
per key and range, so that a rank (or a file) holding a part of a table pays for that part alone.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch

from slipstream.ops.counter_random import mix64

SLICES = 1 << 16
_CHUNK = 1 << 20  # keys sorted into ranges at a time; a multiple of 64


def slice_of(keys_U: torch.Tensor) -> torch.Tensor:
    """int64 in [0, 65536): the top 16 bits of the mixed key."""
    return (mix64(keys_U) >> 48) & (SLICES - 1)


def slice_order(keys_U: torch.Tensor) -> torch.Tensor:
    """The permutation that sorts ascending keys by (slice, key)."""
    return torch.argsort(slice_of(keys_U), stable=True)


@dataclass(frozen=True)
class Placement:
    """Contiguous slice ranges, one per rank."""

    world: int

    def __post_init__(self) -> None:
        if not 1 <= self.world <= SLICES:
            raise ValueError(f"slices can be dealt to 1 … {SLICES} ranks, got {self.world}")

    def slices(self, rank: int) -> tuple[int, int]:
        """First slice of a rank, and the first slice after its last."""
        if not 0 <= rank < self.world:
            raise ValueError(f"ranks are 0 … {self.world - 1}, got {rank}")
        return SLICES * rank // self.world, SLICES * (rank + 1) // self.world

    @cached_property
    def _owners(self) -> torch.Tensor:
        sizes = [high - low for low, high in (self.slices(rank) for rank in range(self.world))]
        return torch.repeat_interleave(torch.arange(self.world), torch.tensor(sizes))

    def owner_of(self, keys_U: torch.Tensor) -> torch.Tensor:
        """int64: the rank that owns each key, shaped like the keys."""
        if self.world == 1:
            return torch.zeros_like(keys_U)
        return self._owners[slice_of(keys_U)]


class SliceLayout:
    """The keys 0 … num_rows - 1 of some slice ranges, numbered within each range in ascending order.

    `bounds` are ascending slices: range r holds bounds[r] <= slice < bounds[r + 1]. A bit per key marks the keys of a range, a
    running count per 64 keys makes their number one look-up and one population count.
    """

    def __init__(self, num_rows: int, bounds: tuple[int, ...]) -> None:
        if len(bounds) < 2 or bounds[0] < 0 or bounds[-1] > SLICES or any(a >= b for a, b in pairwise(bounds)):
            raise ValueError(f"slice bounds must ascend within 0 … {SLICES}, got {bounds}")
        self.num_rows, self.bounds = num_rows, bounds
        ranges = len(bounds) - 1
        self._range_of_slice = np.searchsorted(np.array(bounds), np.arange(SLICES), side="right") - 1
        self._range_of_slice[(np.arange(SLICES) < bounds[0]) | (np.arange(SLICES) >= bounds[-1])] = -1
        self._bits_RW = np.zeros((ranges, -(-num_rows // 64)), dtype=np.uint64)
        for start in range(0, num_rows, _CHUNK):
            self._mark(start, min(start + _CHUNK, num_rows))
        marked_RW = np.bitwise_count(self._bits_RW).astype(np.int64)
        self.counts = marked_RW.sum(axis=1)  # keys of each range
        self._before_RW = (marked_RW.cumsum(axis=1) - marked_RW).astype(np.uint32)

    def _mark(self, start: int, end: int) -> None:
        ranges_K = self.ranges_of(torch.arange(start, end))
        for number in range(len(self.bounds) - 1):
            packed = np.packbits(ranges_K == number, bitorder="little")
            words = np.zeros(-(-(end - start) // 64) * 8, dtype=np.uint8)
            words[: len(packed)] = packed
            self._bits_RW[number, start // 64 : start // 64 + len(words) // 8] = words.view("<u8")

    def ranges_of(self, keys_U: torch.Tensor) -> np.ndarray:
        """The range that holds each key, -1 where none does."""
        return self._range_of_slice[slice_of(keys_U).numpy()]

    def locate(self, keys_U: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """(range, number within the range) of each key; every key must belong to one of the ranges."""
        ranges_U = self.ranges_of(keys_U)
        if len(ranges_U) and ranges_U.min() < 0:
            stray = int(keys_U[int(ranges_U.argmin())])
            raise IndexError(f"key {stray} lies in a slice this rank does not own ({self.bounds[0]} … {self.bounds[-1] - 1})")
        keys = keys_U.numpy().astype(np.uint64)
        words = keys >> np.uint64(6)
        below = (np.uint64(1) << (keys & np.uint64(63))) - np.uint64(1)
        inside = np.bitwise_count(self._bits_RW[ranges_U, words] & below)
        return ranges_U, self._before_RW[ranges_U, words].astype(np.int64) + inside

    def keys_of(self, number: int) -> torch.Tensor:
        """All keys of a range, ascending: the inverse of `locate`."""
        bits = np.unpackbits(self._bits_RW[number].view(np.uint8), bitorder="little")
        return torch.from_numpy(np.flatnonzero(bits))
