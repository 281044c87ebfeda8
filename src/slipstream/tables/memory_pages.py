"""Zero-filled memory that is allocated on first use, in huge pages where the system allows them.

Touch this to support another system's huge pages. Rows are read at random: with 4 KiB pages nearly
every read also misses the translation buffer, with 2 MiB pages few do.
"""

import contextlib
import math
import mmap

import torch

_WORTH_MAPPING = 1 << 22  # below this many bytes huge pages bring nothing
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def lazy_zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros as `torch.zeros` does; large ones use no memory before they are touched."""
    size = math.prod(shape) * dtype.itemsize
    if size < _WORTH_MAPPING or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(*shape, dtype=dtype)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    with contextlib.suppress(OSError):  # not allowed here: ordinary pages do
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(*shape)
