"""Loads the compiled kernels (native/*.cpp) for the best instruction set of this CPU.

The libraries have a plain C interface. They are opened after torch, so that both share one OpenMP
runtime and one thread pool. Where nothing was compiled the reference back-end serves, after one
warning. SLIPSTREAM_NATIVE_DIR names another folder with compiled kernels (`make sanitize` uses it),
SLIPSTREAM_NATIVE_LEVEL one instruction set. Touch this when kernels are built or found in another
way.
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
    """Compiled libraries that this CPU can run, best first."""
    requested = os.environ.get("SLIPSTREAM_NATIVE_LEVEL")
    levels = _ALLOWED.get(torch.backends.cpu.get_cpu_capability(), _LEVELS[2:])
    folder = Path(os.environ.get("SLIPSTREAM_NATIVE_DIR") or Path(__file__).parent)
    return [
        path
        for level in levels
        if requested in (None, level)
        for path in sorted(folder.glob(f"_native_{level}.*so"))
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
    """Whether compiled kernels are there."""
    return library() is not None


def status() -> str:
    """Which library serves, as a phrase for messages and reports."""
    loaded = library()
    if loaded is None:
        return "native kernels: not built"
    # The symbol is looked up in the library and what it is linked with, so in OpenMP's.
    threads = "" if hasattr(loaded, "omp_get_max_threads") else ", one thread (without OpenMP)"
    return f"native kernels: {Path(loaded._name).name}{threads}"


def address(tensor: torch.Tensor | None, dtype: torch.dtype | None = None) -> int | None:
    """Where a contiguous tensor (of `dtype`, if given) lies in memory; NULL for None."""
    if tensor is None:
        return None
    if dtype is not None and tensor.dtype != dtype:
        raise TypeError(f"a native kernel takes {dtype} here, got {tensor.dtype}")
    if not tensor.is_contiguous():
        raise ValueError("a tensor handed to a native kernel must be contiguous")
    return tensor.data_ptr()
