"""Pages of memory, asked of the system before they are written.

The first write to a page waits until the system has found and cleared it: about 0.7 ms a MiB, and
several ms in a virtual machine whose host must find it, too. Touch this when memory is asked for in
another way.
"""

import atexit
import ctypes
import mmap
import os
import sys
import threading
from collections.abc import Iterable

import torch

_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_SLICE = 2 << 20  # bytes: the process's map of memory is locked while they are populated
_LOWEST_PRIORITY = 19
_ending = threading.Event()
_threads: set[threading.Thread] = set()
_PAUSE_SECONDS = 0.005  # that `populate_slowly` leaves to others after a slice


def prefer_large_pages(bytes_N: torch.Tensor) -> None:
    """Have the system use large pages (2 MiB) for memory where it can: few faults, cleared fast."""
    _advise(bytes_N, _MADV_HUGEPAGE)


def populate(bytes_N: torch.Tensor) -> None:
    """Have the system map and clear the pages of memory, which keeps its content.

    Where it cannot, each page is mapped and cleared when it is first written.
    """
    for piece in bytes_N.split(_SLICE):
        _advise(piece, _MADV_POPULATE_WRITE)


def populate_slowly(pieces: Iterable[torch.Tensor]) -> None:
    """Populate pieces of memory in a thread that lets all others go first.

    It ends before the interpreter does.
    """

    def work() -> None:
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        for piece in pieces:
            populate(piece)
            if _ending.wait(_PAUSE_SECONDS):
                break
        _threads.discard(threading.current_thread())

    thread = threading.Thread(target=work, name="slipstream-pages", daemon=True)
    _threads.add(thread)
    thread.start()


@atexit.register
def _end_threads() -> None:
    """End the threads while the interpreter is whole."""
    _ending.set()
    for thread in list(_threads):
        thread.join(1.0)


def _advise(bytes_N: torch.Tensor, advice: int) -> None:
    if sys.platform != "linux":
        return
    begin = bytes_N.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    end = bytes_N.data_ptr() + bytes_N.numel()
    length = ctypes.c_size_t(end - begin)
    ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), length, ctypes.c_int(advice))
