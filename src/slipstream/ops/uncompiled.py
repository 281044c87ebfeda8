"""torch's functions inside their wrappers for torch.compile.

Some of them load the whole compiler at their first call, only to say that they are not to be
compiled: two to three seconds of every start of a training process. Nothing here is compiled, so
what is wrapped is called directly.
"""

import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """The innermost function; one that is not wrapped stays what it is."""
    found: Callable[P, R] = inspect.unwrap(function)
    return found
