"""Words for what a key of a recipe takes, from its type: used by errors and by the reference.

Touch this when recipes get a new kind of value.
"""

from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from pydantic.fields import FieldInfo

_TYPES = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
_BOUNDS = {"ge": "at least {}", "gt": "above {}", "le": "at most {}", "lt": "below {}"}
_LONGEST = 80  # characters of a wrong value that an error repeats
_OWN_WORDS = ("value_error", "assertion_error")  # errors whose message we wrote
_FREE_TEXT = "string_pattern_mismatch"


def describe_field(field: FieldInfo) -> str:
    """Return what a field takes: `a whole number of at least 1`, `own, next or none`."""
    return describe_values(field.annotation, field.metadata)


def describe_values(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Return what an annotation takes, in a few words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return _either([str(value) for value in arguments])
    if origin in (Union, UnionType):
        several = set(arguments) - ({int} if float in arguments else set())  # a number may be whole
        kinds = [
            describe_values(part, metadata)
            for part in arguments
            if part in several and part is not type(None)
        ]
        return _either(list(dict.fromkeys(kinds)))
    if hasattr(annotation, "__metadata__"):
        return describe_values(arguments[0], (*annotation.__metadata__, *metadata))
    if origin is tuple and Ellipsis in arguments:
        return f"a list of values, each {describe_values(arguments[0])}"
    if origin is tuple:
        kinds = list(dict.fromkeys(describe_values(part) for part in arguments))
        return f"a list of {len(arguments)} values, each {_either(kinds)}"
    if origin is dict:
        return "a mapping of names to settings"
    words = _TYPES.get(annotation, "a mapping of keys to values")
    bounds = _bounds(metadata)
    return f"{words} {'of ' if bounds.startswith('at ') else ''}{bounds}" if bounds else words


def _either(words: list[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _bounds(metadata: Sequence[Any]) -> str:
    """Return `at least 0 and below 1` from the bounds pydantic keeps."""
    parts = [part for one in metadata for part in (getattr(one, "metadata", None) or [one])]
    return " and ".join(
        words.format(value)
        for name, words in _BOUNDS.items()
        for part in parts
        if (value := getattr(part, name, None)) is not None
    )


def explain(model: type[BaseModel], error: Mapping[str, Any], where: str) -> str:
    """Return one of pydantic's errors as a sentence: the key, what it must be, what it is."""
    field, path = _find_field(model, error["loc"])
    key = ".".join(path) or "the recipe"
    if error["type"] in _OWN_WORDS:
        message = error["msg"].partition(", ")[2]
        return f"{key} in {where}: {message[0].lower()}{message[1:]}"
    if error["type"] == "missing" and field is not None:
        return f"{key} in {where} is missing; it must be {describe_field(field)}"
    given = repr(error["input"])
    given = given if len(given) <= _LONGEST else f"{given[:_LONGEST]}…"
    if field is None:
        return f"{key} in {where} must be a mapping of keys to values, got {given}"
    if error["type"] == _FREE_TEXT:
        return f"{key} in {where} cannot be {given}; it is {field.description or 'other text'}"
    return f"{key} in {where} must be {describe_field(field)}, got {given}"


def _find_field(
    model: type[BaseModel], place: Sequence[int | str]
) -> tuple[FieldInfo | None, list[str]]:
    """Return the field at a place of pydantic's, and its key without places inside a value."""
    found: FieldInfo | None = None
    inside: Any = model
    path: list[str] = []
    for part in place:
        if isinstance(inside, type) and issubclass(inside, BaseModel):
            found = inside.model_fields.get(str(part))
            inside = None if found is None else found.annotation
        elif hasattr(inside, "__dataclass_fields__"):
            inside = get_type_hints(inside).get(str(part))
            found = FieldInfo(annotation=inside)
        elif get_origin(inside) is dict:
            inside = get_args(inside)[1]
        else:
            break
        path.append(str(part))
    return found, path
