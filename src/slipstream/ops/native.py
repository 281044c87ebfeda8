"""Loads the compiled kernels (native/*.cpp) through their plain C ABI and picks the best
instruction set of this CPU.

The libraries are opened after torch, so that both share one OpenMP runtime and one thread pool.
Where nothing was compiled the reference back-end serves, after one clear warning.
"""

import ctypes
import functools
import os
import warnings
from pathlib import Path

import torch

_LEVELS = ("avx512", "avx2", "baseline")
_ALLOWED = {"AVX512": _LEVELS, "AVX2": _LEVELS[1:]}


def _candidates() -> list[Path]:
    """Built libraries that this CPU can run, best first. SLIPSTREAM_NATIVE_LEVEL narrows the choice
    (tests compare levels).
    """
    wished = os.environ.get("SLIPSTREAM_NATIVE_LEVEL")
    levels = _ALLOWED.get(torch.backends.cpu.get_cpu_capability(), _LEVELS[2:])
    here = Path(__file__).parent
    return [
        path
        for level in levels
        if wished in (None, level)
        for path in sorted(here.glob(f"_native_{level}.*so"))
    ]


@functools.cache
def library() -> ctypes.CDLL | None:
    """The loaded kernels, or None (with one warning) where there are none."""
    for path in _candidates():
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            continue
    warnings.warn(
        "Slipstream's native kernels were not built, so the slower reference operators serve; "
        "install g++ and run `pip install -e .` again to have them",
        stacklevel=2,
    )
    return None


def available() -> bool:
    """Whether compiled kernels can serve."""
    return library() is not None


def status() -> str:
    """One phrase for messages and reports: which library serves."""
    loaded = library()
    return (
        f"native kernels: {Path(loaded._name).name}"
        if loaded is not None
        else "native kernels: not built"
    )


def address(tensor: torch.Tensor | None) -> int | None:
    """Where a contiguous tensor's data lies, as ctypes takes it; NULL for None."""
    if tensor is None:
        return None
    if not tensor.is_contiguous():
        raise ValueError("a tensor handed to a native kernel must be contiguous")
    return tensor.data_ptr()
