"""Checks what a caller of the Python functions gave: argument names, whole numbers, ids.

A wrong argument is a SlipstreamError of one sentence, never a TypeError. Touch this when an
argument had another name before, or when another type is accepted.
"""

import contextlib
import functools
import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np

from slipstream.errors import SlipstreamError, did_you_mean

# Flags of the command whose argument here is not the flag with underscores.
_ARGUMENTS = {
    "--force": "force=True",
    "--user-column": "user",
    "--item-column": "item",
    "--time-column none": "time=None",
    "--time-column": "time",
    "--action-columns": "actions",
    "--context-columns": "context",
    "--title-column": "title",
    "--multi-separator": "separator",
}
P = ParamSpec("P")
R = TypeVar("R")


def clear_arguments(
    aliases: Mapping[str, str] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function say in one sentence which of its arguments is wrong.

    `aliases` maps names that people try to the hint they get.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                name = function.__name__
                raise SlipstreamError(
                    _wrong_call(name, signature, args, kwargs, aliases or {})
                ) from error
            return function(*args, **kwargs)

        return call

    return decorate


def _wrong_call(
    function: str,
    signature: inspect.Signature,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    aliases: Mapping[str, str],
) -> str:
    """Return what is wrong with a call that does not fit its signature."""
    known = {
        name: each
        for name, each in signature.parameters.items()
        if name != "self" and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    }
    for name in kwargs:
        if name in aliases:
            return f"{function} has no argument '{name}'; {aliases[name]}"
        if name not in known:
            return f"{function} has no argument '{name}'{did_you_mean(name, known)}"
    places = [name for name, each in known.items() if each.kind == each.POSITIONAL_OR_KEYWORD]
    given = args[1:] if "self" in signature.parameters else args
    if len(given) > len(places):
        by_name = ", ".join(name for name in known if name not in places) or "nothing"
        return (
            f"{function} takes {', '.join(places) or 'nothing'} in this order, then by name: "
            f"{by_name}; got {len(given)} values without a name"
        )
    for name in places[: len(given)]:
        if name in kwargs:
            return f"{function} got '{name}' twice, by its place and by its name; give it once"
    missing = [
        name
        for name, each in known.items()
        if each.default is each.empty and name not in kwargs and name not in places[: len(given)]
    ]
    return f"{function} needs {' and '.join(repr(name) for name in missing)}; give it"


def whole_number(name: str, value: Any, least: int | None = None) -> int:
    """Return a whole number that an argument must be; `least` is the smallest allowed."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise SlipstreamError(f"{name} must be a whole number, got {value!r}")
    if least is not None and value < least:
        raise SlipstreamError(f"{name} must be at least {least}, got {value}")
    return int(value)


def one_of(name: str, value: Any, choices: tuple[str, ...]) -> str:
    """Return a word that must be one of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise SlipstreamError(f"unknown {name} {value!r}{did_you_mean(str(value), choices)}")
    return value


def is_id(value: Any) -> bool:
    """Whether a value can be an original id: a whole number or text."""
    return isinstance(value, int | str | np.integer) and not isinstance(value, bool)


def ids_of(name: str, values: Any) -> list[int | str]:
    """Return original ids, given as one id or as a list, set, array, column or tensor of them."""
    if is_id(values):
        return [values]
    if hasattr(values, "to_list"):  # a column of Polars or pandas
        values = values.to_list()
    elif hasattr(values, "tolist"):  # numpy, torch
        values = values.tolist()
    if isinstance(values, Mapping) or not hasattr(values, "__iter__"):
        raise SlipstreamError(f"{name} must be an id or a list of ids, got {values!r}")
    found = list(values)
    for value in found:
        if not is_id(value):
            raise SlipstreamError(
                f"{name} must hold original ids, whole numbers or text, but {value!r} is "
                f"a {type(value).__name__}"
            )
    return found


def path_of(name: str, value: Any) -> Path:
    """Return a path that an argument must be."""
    if not isinstance(value, str | os.PathLike):
        raise SlipstreamError(f"{name} must be a path, got {value!r}")
    return Path(value)


@contextlib.contextmanager
def in_python_words() -> Iterator[None]:
    """Let errors name arguments of the Python function instead of the command's flags."""
    try:
        yield
    except SlipstreamError as error:
        text = str(error)
        for flag, argument in _ARGUMENTS.items():
            text = text.replace(flag, argument)
        flags = r"(?<![\w-])--([a-z]+(?:-[a-z]+)*)"
        text = re.sub(flags, lambda found: found[1].replace("-", "_"), text)
        if text == str(error):
            raise
        raise SlipstreamError(text) from error
