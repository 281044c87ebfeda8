"""Pages of memory, asked of the system before they are written.

The first write to a page waits until the system has found and cleared it: about 0.7 ms a MiB, and
several ms in a virtual machine whose host must find it, too. Touch this when memory is asked for in
another way.
"""

import ctypes
import mmap
import sys

import torch

_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14


def prefer_large_pages(bytes_N: torch.Tensor) -> None:
    """Have the system use large pages (2 MiB) for memory where it can: few faults, cleared fast."""
    _advise(bytes_N, _MADV_HUGEPAGE)


def populate(bytes_N: torch.Tensor) -> None:
    """Have the system map and clear the pages of memory, which keeps its content.

    Where it cannot, each page is mapped and cleared when it is first written.
    """
    _advise(bytes_N, _MADV_POPULATE_WRITE)


def _advise(bytes_N: torch.Tensor, advice: int) -> None:
    if sys.platform != "linux":
        return
    begin = bytes_N.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    end = bytes_N.data_ptr() + bytes_N.numel()
    length = ctypes.c_size_t(end - begin)
    ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), length, ctypes.c_int(advice))
