"""Calls one compiled kernel with tensors and numbers, converted once and for all to what its C
signature wants.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch

from slipstream.ops import native

_TYPES: dict[str, Any] = {
    "p": ctypes.c_void_p,
    "n": ctypes.c_int64,
    "i": ctypes.c_int,
    "f": ctypes.c_float,
    "d": ctypes.c_double,
}


@functools.cache
def kernel(name: str, signature: str, *, returns: bool = False) -> Callable[..., int]:
    """The kernel `name`; a letter per argument: p tensor or None, n int64, i int, f float, d
    double; threads are added last.
    """
    library = native.library()
    if library is None:
        raise RuntimeError("native kernels were asked for but are not built")
    function = library[name]
    function.argtypes = [_TYPES[letter] for letter in signature] + [ctypes.c_int]
    function.restype = ctypes.c_int64 if returns else None

    pointers = [place for place, letter in enumerate(signature) if letter == "p"]

    def call(*arguments: Any) -> int:
        if len(arguments) != len(signature):
            raise TypeError(f"kernel {name} takes {len(signature)} arguments, got {len(arguments)}")
        converted = list(arguments)
        for place in pointers:
            converted[place] = native.address(arguments[place])
        return function(*converted, torch.get_num_threads())

    return call


class _NoContext:
    """What a forward pass may keep for backward, where there will be none."""

    def save_for_backward(self, *_: object) -> None:
        """Nothing is kept."""


def differentiable(function: type[torch.autograd.Function]) -> Callable[..., torch.Tensor]:
    """`function.apply`, or its forward alone where no gradient is recorded: a served request pays
    nothing for autograd.
    """

    def call(*arguments: Any) -> torch.Tensor:
        recorded = torch.is_grad_enabled()
        result: torch.Tensor = (
            function.apply(*arguments) if recorded else function.forward(_NoContext(), *arguments)
        )
        return result

    return call
