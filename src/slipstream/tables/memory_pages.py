"""Zero-filled memory that costs nothing until it is touched, in huge pages where the system allows
them.

Rows are read at random: with 4 KiB pages nearly every row also misses the translation buffer, with
2 MiB pages few do.
"""

import contextlib
import math
import mmap

import torch

_WORTH_MAPPING = 1 << 22  # below this many bytes huge pages bring nothing
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def lazy_zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """`torch.zeros`, with pages that appear on first touch."""
    size = math.prod(shape) * dtype.itemsize
    if size < _WORTH_MAPPING or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(*shape, dtype=dtype)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    with contextlib.suppress(OSError):  # not allowed here: ordinary pages serve
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(*shape)
