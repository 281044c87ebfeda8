"""The C allocator's setting for long runs: keep freed memory instead of returning it each step.

A training step frees and allocates the same large tensors again and again. By default glibc
returns them to the system each time, and every page must be mapped anew. A trainer or a benchmark
calls this once. Touch this when another allocator needs another setting.
"""

from slipstream.ops import native
from slipstream.ops.kernel_call import kernel


def keep_freed_memory(trim_above: int = (1 << 31) - 1) -> bool:
    """Keep up to `trim_above` freed bytes for reuse; False where the allocator cannot."""
    return native.available() and bool(kernel("ss_keep_freed_memory")(trim_above))
