"""Original item ids as arrays: whole numbers as int64, text as objects; never through float.

Touch this when another type of id is served.
"""

import re
from typing import Any

import numpy as np

from slipstream.serving.request_errors import BadRequest

_WHOLE_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,18}")  # as a number is written, not "007"
_INT64 = range(-(1 << 63), 1 << 63)


def id_array(values: Any) -> np.ndarray:
    """Return ids as int64, or as text where any of them is text."""
    values = values.numpy() if hasattr(values, "numpy") else values
    if isinstance(values, np.ndarray) and values.dtype.kind not in "OU":
        return whole_numbers("item ids", values)
    given = values.tolist() if isinstance(values, np.ndarray) else list(values)
    kinds = set(map(type, given))
    if str not in kinds:
        return whole_numbers("item ids", given)
    if not all(issubclass(kind, str | int | np.integer) for kind in kinds) or bool in kinds:
        raise BadRequest("item ids must be text or whole numbers")
    return np.array([str(value) for value in given], dtype=object)


def as_text(ids: np.ndarray) -> list[str]:
    """Return an id array as text: whole numbers in decimal digits."""
    return ids.tolist() if ids.dtype == object else [str(number) for number in ids.tolist()]


def as_numbers(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return an id array as int64, and which of its ids are whole numbers (the others are 0)."""
    if ids.dtype != object:
        return ids, np.ones(ids.size, dtype=bool)
    numbers = [_number(text) for text in ids.tolist()]
    valid = np.array([number is not None for number in numbers], dtype=bool)
    return np.array([number or 0 for number in numbers], dtype=np.int64), valid


def _number(text: str) -> int | None:
    number = int(text) if _WHOLE_NUMBER.fullmatch(text) else None
    return number if number is not None and number in _INT64 else None


def whole_numbers(noun: str, values: Any) -> np.ndarray:
    """Return values as int64 without passing through float; `noun` names them in the error."""
    values = values.numpy() if hasattr(values, "numpy") else values  # a tensor
    try:
        array = values if isinstance(values, np.ndarray) else _from_python(values)
    except (OverflowError, ValueError, TypeError) as error:
        raise BadRequest(f"{noun} must be whole numbers between -2^63 and 2^63-1") from error
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise BadRequest(f"{noun} must be a flat list of whole numbers")
    if array.dtype.kind == "u" and array.size and int(array.max()) > (1 << 63) - 1:
        raise BadRequest(f"{noun} must be whole numbers between -2^63 and 2^63-1")
    return np.ascontiguousarray(array, dtype=np.int64)


def _from_python(values: Any) -> np.ndarray:
    values = list(values)
    kinds = set(map(type, values))
    if bool in kinds or not all(issubclass(kind, int | np.integer) for kind in kinds):
        raise TypeError("not whole numbers")
    return np.array(values, dtype=np.int64)
