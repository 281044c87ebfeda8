"""Writes docs/reference/recipe.md from the types of a recipe. Run it when a key changes."""

from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from slipstream.data import sampler
from slipstream.training.recipe import RankingTask, Recipe

PAGE = Path(__file__).parent / "reference" / "recipe.md"
HEAD = """# Every key of a recipe

`docs/make_recipe_reference.py` writes this page from the types in `training/recipe.py`,
`models/model_config.py` and `data/sampler.py`.

A recipe is a YAML file. Change a key on the command line by its full name (`model.dim=64`) or,
where it is unique, by its last part (`dim=64`). A section's name stands for its `kind`
(`loss=bce`). In Python:

    ss.train("ml-1m-hstu", max_steps=200, model__dim=64)

Shipped recipes: `demo`, `ml-1m-hstu`, `ml-1m-hstu-full`, `ml-1m-fuxi`, `ml-1m-sasrec`,
`kuairand-pure-ranking`; at the papers' scale `kuairand-1k-hstu`, `kuairand-1k-fuxi`,
`kuairand-27k-hstu`, `kuairand-27k-fuxi`, `synthetic-100m`.
"""
TABLE = "| key | values | default | meaning |\n|---|---|---|---|\n"


def values(annotation: Any) -> str:
    """The values a field takes, in a few words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, UnionType):
        return ", ".join(
            dict.fromkeys(values(part) for part in arguments if part is not type(None))
        )
    if hasattr(annotation, "__metadata__"):
        return values(arguments[0])
    names = {int: "whole number", float: "number", str: "text", bool: "true, false"}
    return names.get(annotation, "list" if origin is tuple else "mapping")


def default(field: FieldInfo) -> str:
    """A field's default as one would write it in YAML."""
    if field.default is PydanticUndefined:
        return ""
    if isinstance(field.default, bool):
        return str(field.default).lower()
    if isinstance(field.default, tuple):
        return "[" + ", ".join(map(str, field.default)) + "]"
    return "" if field.default is None else f"{field.default}"


def rows(model: type[BaseModel], prefix: str) -> str:
    """One table row for each plain field of a section."""
    return "".join(
        f"| `{prefix}{name}` | {values(field.annotation)} | {default(field)} | "
        f"{(field.description or '').replace('<', '&lt;')} |\n"
        for name, field in model.model_fields.items()
        if not is_section(field)
    )


def is_section(field: FieldInfo) -> bool:
    """Whether a field holds keys of its own."""
    kind = field.annotation
    return isinstance(kind, type) and (issubclass(kind, BaseModel) or kind is sampler.Split)


def page() -> str:
    """The whole page."""
    text = HEAD + "\n## The recipe itself\n\n" + TABLE + rows(Recipe, "")
    for name, field in Recipe.model_fields.items():
        if is_section(field) and field.annotation is not sampler.Split:
            title = f"\n## `{name}`: {field.description}\n\n"
            text += title + TABLE + rows(field.annotation, f"{name}.")  # type: ignore[arg-type]
    text += f"\n## `split`: {Recipe.model_fields['split'].description}\n\n" + TABLE
    for name, field in sampler.Split.__dataclass_fields__.items():
        meaning = f"behaviours of the {name} split"
        text += f"| `split.{name}` | whole number | {field.default} | {meaning} |\n"
    text += "\n## `tasks.NAME`: one predicted action of a ranking recipe\n\n" + TABLE
    return text + rows(RankingTask, "tasks.NAME.")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
