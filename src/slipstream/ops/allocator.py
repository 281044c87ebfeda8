"""One switch for long-running processes: keep freed memory instead of giving it back after every
step.

A training step frees and asks for the same large tensors again and again; glibc returns them to the
system each time, and every page is then faulted in anew (about 4 % of an attention forward and
backward). A trainer or a benchmark calls this once.
"""

import ctypes

from slipstream.ops import native


def keep_freed_memory(trim_above: int = (1 << 31) - 1) -> bool:
    """Keep up to `trim_above` bytes of freed memory for reuse; False where the allocator cannot be
    told.
    """
    library = native.library()
    return library is not None and bool(library.ss_keep_freed_memory(ctypes.c_int64(trim_above)))
