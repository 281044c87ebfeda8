"""Recipes: YAML files plus `key=value` overrides, checked against typed models.

An override may name a key by its full path (`model.dim=64`), by its last part where that is unique
(`max_steps=200`), or a section by its kind (`loss=full_softmax`) or by a mapping that is merged
into it (`model={dim: 64}`). A wrong key is refused with the nearest valid one. A key that was
renamed (`renamed` of a section's model) is still accepted. Touch this when recipes are read in
another way; what is in them is `training/recipe.py`, the words for it are in `config_words.py`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from slipstream.config_words import explain
from slipstream.errors import SlipstreamError, did_you_mean

RECIPES = Path(__file__).parent / "recipes"
FIELDS = "__dataclass_fields__"  # a small section may be a dataclass
Model = TypeVar("Model", bound=BaseModel)


def recipe_path(name: str | Path) -> Path:
    """Return the path of a recipe, given by path or by the name of one that ships."""
    path = Path(name)
    if path.is_file():
        return path
    shipped = {p.stem: p for p in RECIPES.glob("*.yaml")}
    if (
        path.suffix in ("", ".yaml")
        and path.stem in shipped
        and (len(path.parts) == 1 or path.parts[0] == "recipes")
    ):
        return shipped[path.stem]
    raise SlipstreamError(f"there is no recipe '{name}'{did_you_mean(path.stem, shipped)}")


def load_recipe(
    model: type[Model], source: str | Path, overrides: Sequence[str] = (), /, **settings: Any
) -> Model:
    """Load a typed recipe, with `overrides` ("key=value") and then `settings` (values) applied."""
    path = recipe_path(source)
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SlipstreamError(
            f"recipe {path} is not valid YAML: {' '.join(str(error).split())}"
        ) from error
    if not isinstance(values, dict):
        raise SlipstreamError(
            f"recipe {path} must be a mapping of keys to values, not a {type(values).__name__}"
        )
    for name, section in _sections(model).items():
        if values.get(name, 0) is None:  # `model:` with nothing below it
            del values[name]
        elif name in values:
            try:
                values[name] = translate_renamed(section, values[name])
            except ValueError as error:
                raise SlipstreamError(f"{name} in {source}: {error}") from None
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals:
            raise SlipstreamError(f"override '{text}' is not of the form key=value")
        _override(model, values, key, _parse(key, value), f"{source} overrides")
    full = {key.replace("__", "."): value for key, value in settings.items()}
    return check(model, merge_settings(model, values, full, f"{source} settings"), str(source))


def merge_settings(
    model: type[BaseModel], values: dict[str, Any], settings: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """Set keys of a recipe's values, in place; return them, still to be checked."""
    for key, value in settings.items():
        _override(model, values, key, value, where)
    return values


def _parse(key: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SlipstreamError(f"override {key}={text} is not a valid value") from error


def _override(
    model: type[BaseModel], values: dict[str, Any], key: str, value: Any, where: str
) -> None:
    """Set one key of a recipe's values; a mapping given for a section is merged into it."""
    if isinstance(value, dict) and key in _sections(model):
        for name, inner in value.items():
            _put(values, resolve_key(model, f"{key}.{name}", where), inner)
    else:
        _put(values, resolve_key(model, key, where), value)


def check(model: type[Model], values: dict[str, Any], where: str) -> Model:
    """Make a typed model of `values`; the first thing wrong with them becomes one sentence."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "extra_forbidden":
            key = ".".join(str(part) for part in first["loc"])
            raise SlipstreamError(
                f"unknown key '{key}' in {where}{did_you_mean(key, _all_keys(model))}"
            ) from None
        raise SlipstreamError(explain(model, first, where)) from None


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one, with full keys (`model.dim`)."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        inner = flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {}
        flat |= inner or {prefix + name: value}
    return flat


def translate_renamed(model: type[BaseModel], values: Any) -> Any:
    """Return a section's values with the keys of earlier versions under their present names."""
    names: dict[str, str] = getattr(model, "renamed", {})
    if not isinstance(values, dict) or not names.keys() & values.keys():
        return values
    for old, new in names.items():
        if old in values and new in values:
            raise ValueError(f"'{old}' is called '{new}' now; give only '{new}'")
    return {names.get(key, key): value for key, value in values.items()}


def _sections(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """Return the fields of a model that are models themselves."""
    found = {}
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            found[name] = info.annotation
    return found


def _all_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Return every full key of a model, sections included."""
    keys = [prefix + name for name in model.model_fields]
    for name, section in _sections(model).items():
        keys += _all_keys(section, f"{prefix}{name}.")
    for name, field in model.model_fields.items():
        keys += [f"{prefix}{name}.{key}" for key in getattr(field.annotation, FIELDS, ())]
    return keys


def resolve_key(model: type[BaseModel], key: str, where: str) -> list[str]:
    """Return the path of a key: full, a unique last part, or a section for its `kind`."""
    keys = _all_keys(model)
    key = _present_name(model, key)
    matches = [key] if key in keys else [full for full in keys if full.rsplit(".", 1)[-1] == key]
    if not matches and _inside_free_mapping(model, key):
        matches = [key]
    if not matches:
        short = {full.rsplit(".", 1)[-1] for full in keys}
        raise SlipstreamError(
            f"unknown key '{key}' in {where}{did_you_mean(key, set(keys) if '.' in key else short)}"
        )
    if len(matches) > 1:
        raise SlipstreamError(f"key '{key}' in {where} is ambiguous: write {' or '.join(matches)}")
    path = matches[0].split(".")
    section = _sections(model).get(path[0]) if len(path) == 1 else None
    return [*path, "kind"] if section is not None and "kind" in section.model_fields else path


def _present_name(model: type[BaseModel], key: str) -> str:
    """Return the full present key for one of an earlier version, given in full or by its end."""
    for name, section in _sections(model).items():
        for old, new in getattr(section, "renamed", {}).items():
            if key in (old, f"{name}.{old}"):
                return f"{name}.{new}"
    return key


def _inside_free_mapping(model: type[BaseModel], key: str) -> bool:
    """Whether the key's first part is a field with keys of its own, such as a ranking's tasks."""
    head = key.split(".")[0]
    info = model.model_fields.get(head)
    return "." in key and info is not None and str(info.annotation).startswith("dict")


def _put(values: dict[str, Any], path: list[str], value: Any) -> None:
    for part in path[:-1]:
        inner = values.get(part)
        if not isinstance(inner, dict):
            inner = values[part] = {} if inner is None else {"kind": inner}
        values = inner
    values[path[-1]] = value
