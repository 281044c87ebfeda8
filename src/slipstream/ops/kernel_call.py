"""Calls of compiled kernels with tensors and numbers, as their C signatures want them.

Touch this when the way Python reaches the kernels changes; what each kernel takes is listed in
kernel_signatures.py.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import Any, cast

import torch

from slipstream.ops import native
from slipstream.ops.kernel_signatures import SIGNATURES

_NUMBERS: dict[str, Any] = {
    "int": ctypes.c_int,
    "int32": ctypes.c_int32,
    "int64": ctypes.c_int64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}
_RESULTS: dict[str, Any] = {"void": None} | _NUMBERS
# What a tensor must hold for each kind of pointer; None: any dtype.
_DTYPES: dict[str, torch.dtype | None] = {
    "float*": torch.float32,
    "int64*": torch.int64,
    "int32*": torch.int32,
    "uint8*": torch.uint8,
    "int8*": torch.int8,
    "int16*": torch.int16,
    "HashPair*": torch.int64,
    "char*": None,
    "void*": None,
}


@functools.cache
def kernel(name: str) -> Callable[..., int]:
    """The kernel `name`; takes a tensor or None for each pointer, adds the thread count."""
    library = native.library()
    if library is None:
        raise RuntimeError("the native kernels were not built; use back-end 'reference'")
    kinds = SIGNATURES[name].kinds
    if not hasattr(library, name):
        raise RuntimeError(
            f"the native kernels are older than this package (no {name}); build them again with "
            "`pip install -e .`"
        )
    function = library[name]
    function.argtypes = [_NUMBERS.get(kind, ctypes.c_void_p) for kind in kinds]
    function.restype = _RESULTS[SIGNATURES[name].result]

    threaded = SIGNATURES[name].arguments[-1] == ("int", "threads")
    count = len(kinds) - threaded
    pointers = [(place, _DTYPES[kind]) for place, kind in enumerate(kinds) if kind in _DTYPES]

    def call(*arguments: Any) -> int:
        if len(arguments) != count:
            raise TypeError(f"kernel {name} takes {count} arguments, got {len(arguments)}")
        converted = list(arguments)
        for place, dtype in pointers:
            converted[place] = native.address(arguments[place], dtype)
        if threaded:
            converted.append(torch.get_num_threads())
        result: int = function(*converted)
        return result

    return call


class NoContext:
    """The context of a forward pass that no backward pass follows."""

    def save_for_backward(self, *_: object) -> None:
        """Keep nothing."""


def apply(function: type[torch.autograd.Function], *arguments: Any) -> torch.Tensor:
    """`function.apply` with a typed result."""
    result: torch.Tensor = cast(Any, function).apply(*arguments)
    return result


def differentiable(function: type[torch.autograd.Function]) -> Callable[..., torch.Tensor]:
    """`function.apply`, or its forward alone where no gradient is recorded (serving)."""

    def call(*arguments: Any) -> torch.Tensor:
        if torch.is_grad_enabled():
            return apply(function, *arguments)
        result: torch.Tensor = function.forward(NoContext(), *arguments)
        return result

    return call
