"""The C allocator's setting for long runs: keep freed memory instead of returning it each step.

A training step, and a pass of a server, frees and allocates the same large tensors again and again.
By default glibc returns them to the system each time, and every page must be mapped anew. A
trainer, a server or a benchmark calls this once. Touch this when another allocator needs another
setting.
"""

import ctypes
import platform

from slipstream.ops import native
from slipstream.ops.kernel_call import kernel

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
_LARGEST_MMAP_THRESHOLD = 32 << 20  # what glibc takes


def keep_freed_memory(trim_above: int = (1 << 31) - 1) -> bool:
    """Keep up to `trim_above` freed bytes for reuse; False where the allocator cannot."""
    return native.available() and bool(kernel("ss_keep_freed_memory")(trim_above))


def keep_freed_pieces(trim_above: int = 64 << 20) -> bool:
    """Keep freed pieces up to 32 MiB for reuse, in all `trim_above` bytes of a thread.

    Larger ones still go back at once, so a process that holds few of them stays small. False where
    the allocator has no such setting.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    set_option = ctypes.CDLL(None).mallopt
    return bool(
        set_option(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        and set_option(_M_TRIM_THRESHOLD, trim_above)
    )
