"""One reserved block of memory, divided into contiguous pieces (best fit, neighbours merge).

Attention reads the keys of a layer as one piece, so a prefix gets one extent, not scattered pages.
Addresses are reserved at the start; the system gives pages from the first piece on, so a process
that was never asked is small. Touch this when memory is divided in another way.
"""

import weakref
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

import torch

from slipstream.serving.cache.pages import populate_slowly, prefer_large_pages

ALIGN = 64
FETCHED_BYTES = 2 << 20  # of memory whose pages are fetched at once


class Extents:
    """The free bytes of a range. Sizes are rounded up to 64 bytes."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes // ALIGN * ALIGN
        # (offset, size) of every free piece, in the order of the offsets
        self._free: list[tuple[int, int]] = []
        self._by_size: list[tuple[int, int]] = []  # (size, offset) of the same, the smallest first
        self._replace(0, 0, [(0, self.nbytes)])
        self.used = 0

    def _replace(self, first: int, last: int, pieces: Iterable[tuple[int, int]]) -> None:
        """Put pieces in the place of some free ones; those without bytes are left out."""
        for offset, size in self._free[first:last]:
            del self._by_size[bisect_left(self._by_size, (size, offset))]
        kept = [(offset, size) for offset, size in pieces if size]
        for offset, size in kept:
            insort(self._by_size, (size, offset))
        self._free[first:last] = kept

    @staticmethod
    def rounded(nbytes: int) -> int:
        """The bytes that a piece of `nbytes` occupies."""
        return (max(1, nbytes) + ALIGN - 1) // ALIGN * ALIGN

    def take(self, nbytes: int) -> int | None:
        """Take the smallest free piece that fits; return its offset, None where none fits."""
        size = self.rounded(nbytes)
        found = bisect_left(self._by_size, (size, 0))
        if found == len(self._by_size):
            return None
        free, offset = self._by_size[found]
        at = bisect_left(self._free, (offset, 0))
        self._replace(at, at + 1, [(offset + size, free - size)])
        self.used += size
        return offset

    def take_at(self, offset: int, nbytes: int) -> bool:
        """Take exactly the piece at `offset`; False where it is not free."""
        size = self.rounded(nbytes)
        for at, (start, free) in enumerate(self._free):
            if start <= offset and offset + size <= start + free:
                pieces = [(start, offset - start), (offset + size, start + free - offset - size)]
                self._replace(at, at + 1, pieces)
                self.used += size
                return True
        return False

    def grow(self, nbytes: int) -> None:
        """Add free bytes at the end; `nbytes` is a multiple of 64."""
        end, self.nbytes = self.nbytes, self.nbytes + nbytes
        self.used += nbytes
        self.give(end, nbytes)

    def fits_after(self, nbytes: int, returned: Iterable[tuple[int, int]]) -> bool:
        """Whether a piece would fit once these (offset, bytes) were returned, in this order.

        It reads no more of them than are needed.
        """
        wanted, sizes = self.rounded(nbytes), dict(self._free)
        if self._by_size and self._by_size[-1][0] >= wanted:
            return True
        begins = {offset + size: offset for offset, size in self._free}
        for piece, size in returned:
            begin, end = begins.get(piece, piece), piece + self.rounded(size)
            end += sizes.get(end, 0)
            if end - begin >= wanted:
                return True
            sizes[begin], begins[end] = end - begin, begin
        return False

    def give(self, offset: int, nbytes: int) -> None:
        """Return a piece; `ValueError` where it is free already."""
        size = self.rounded(nbytes)
        at = bisect_left(self._free, (offset, 0))
        before, after = self._free[at - 1 : at] if at else [], self._free[at : at + 1]
        if (before and sum(before[0]) > offset) or (after and after[0][0] < offset + size):
            raise ValueError(f"the piece at {offset} was returned twice")
        first, last = at, at
        if before and sum(before[0]) == offset:
            offset, size, first = before[0][0], size + before[0][1], at - 1
        if after and after[0][0] == offset + size:
            size, last = size + after[0][1], at + 1
        self._replace(first, last, [(offset, size)])
        self.used -= self.rounded(nbytes)


class Arena(Extents):
    """Extents with the memory they divide.

    From the first piece on, the pages of the whole block are fetched in the background. Once they
    are there, no computation waits for the system to find and clear them.
    """

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.memory = torch.empty(self.nbytes, dtype=torch.uint8)
        prefer_large_pages(self.memory)
        self._fetching = False

    def take(self, nbytes: int) -> int | None:
        """Take the smallest free piece that fits; return its offset, None where none fits."""
        if not self._fetching:
            self._fetching = True
            self._fetch_pages()
        return super().take(nbytes)

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """The bytes of a piece."""
        return self.memory[offset : offset + nbytes]

    def _fetch_pages(self) -> None:
        """Fetch the pages of the whole block in the background, while the arena is in use."""
        populate_slowly(_slices(weakref.ref(self), self.nbytes))


def _slices(arena: "weakref.ref[Arena]", nbytes: int) -> Iterator[torch.Tensor]:
    """Yield the memory of an arena in pieces, until it is gone."""
    for offset in range(0, nbytes, FETCHED_BYTES):
        present = arena()
        if present is None:
            return
        yield present.memory[offset : offset + FETCHED_BYTES]
        del present
