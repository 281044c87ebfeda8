"""Functions of torch without their wrappers for torch.compile.

Some wrappers load the whole compiler at their first call, only to mark the function as not to be
compiled, which costs two to three seconds at every start of a training process. Nothing here is
compiled, so the wrapped function is called directly. Touch this when torch drops the wrappers.
"""

import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """The innermost wrapped function, or `function` itself where it is not wrapped."""
    found: Callable[P, R] = inspect.unwrap(function)
    return found
