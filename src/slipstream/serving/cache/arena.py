"""One reserved block of memory, divided into contiguous pieces (best fit, neighbours merge).

Attention reads the keys of a layer as one piece, so a prefix gets one extent, not scattered pages.
Addresses are reserved at the start; the system gives pages shortly before they are first written.
Best fit fills the block from its beginning, so an idle process is small. Touch this when memory is
divided in another way.
"""

import threading
from bisect import bisect_left, insort
from collections.abc import Iterable

import torch

from slipstream.serving.cache.pages import populate, prefer_large_pages

ALIGN = 64
PAGES_AHEAD = 32 << 20  # bytes


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

    Once a piece was taken, the pages of what will be taken next are fetched in the background: no
    computation waits for the system to find and clear them.
    """

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.memory = torch.empty(self.nbytes, dtype=torch.uint8)
        prefer_large_pages(self.memory)
        self._fetched = 0  # bytes from the beginning whose pages are there, or on their way

    def take(self, nbytes: int) -> int | None:
        """Take the smallest free piece that fits; return its offset, None where none fits."""
        offset = super().take(nbytes)
        if offset is not None:
            self._fetch_pages(offset + self.rounded(nbytes))
        return offset

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """The bytes of a piece."""
        return self.memory[offset : offset + nbytes]

    def _fetch_pages(self, used: int) -> None:
        """Have pages fetched up to `PAGES_AHEAD` behind the bytes that were used so far."""
        if self._fetched == self.nbytes or used + PAGES_AHEAD // 2 <= self._fetched:
            return
        begin, self._fetched = self._fetched, min(self.nbytes, used + PAGES_AHEAD)
        pages = self.memory[begin : self._fetched]
        threading.Thread(target=populate, args=(pages,), name="pages", daemon=True).start()
