"""The reference of recipes, made from their types: every key, and every recipe that ships.

`slipstream recipes` prints it and docs/reference/recipe.md holds it. Touch this when the reference
should say more about a key.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from slipstream.config import RECIPES, load_recipe, recipe_path
from slipstream.config_words import describe_field, describe_values
from slipstream.training.recipe import Recipe
from slipstream.training.recipe_sections import RankingTask

HEAD = """# Every key of a recipe

`docs/make_recipe_reference.py` writes this page from the types in `training/recipe.py`,
`models/model_config.py` and `data/sampler.py`. `slipstream recipes --keys` prints the same.

A recipe is a YAML file. Change a key on the command line by its full name (`model.dim=64`) or,
where it is unique, by its last part (`dim=64`). A section's name stands for its `kind`
(`loss=bce`), or takes a mapping that is merged into it (`model="{dim: 64, heads: 1}"`). In Python:

    ss.train("ml-1m-hstu", max_steps=200, model__dim=64)
    ss.train("ml-1m-hstu", max_steps=200, model={"dim": 64})

## Recipes that ship

`slipstream recipes` lists them, `slipstream recipes NAME` prints one.

| recipe | task | model | data | schedule | about |
|---|---|---|---|---|---|
"""
TABLE = "| key | values | default | meaning |\n|---|---|---|---|\n"


@dataclass(frozen=True)
class RecipeKey:
    """One key of a recipe, in words."""

    section: str  # "" for keys of the recipe itself
    key: str  # in full: model.dim
    values: str
    default: str
    meaning: str


@dataclass(frozen=True)
class ShippedRecipe:
    """One recipe that comes with the package."""

    name: str
    task: str
    model: str
    data: str  # the store it is for; "" for any
    schedule: str  # the one it names, or that none can run it
    about: str  # the file's first comment


def recipe_keys() -> list[RecipeKey]:
    """Return every key of a recipe, section by section."""
    found = _keys_of(Recipe, "", "")
    for name, field in Recipe.model_fields.items():
        section: Any = field.annotation
        if not _is_section(field):
            continue
        if issubclass(section, BaseModel):
            found += _keys_of(section, name, f"{name}.")
        else:
            found += [
                RecipeKey(
                    name,
                    f"{name}.{key}",
                    describe_values(get_type_hints(section)[key]).removeprefix("a "),
                    "" if part.default is None else str(part.default),
                    str(part.metadata["about"]),
                )
                for key, part in section.__dataclass_fields__.items()
            ]
    return found + _keys_of(RankingTask, "tasks.NAME", "tasks.NAME.")


def _keys_of(model: type[BaseModel], section: str, prefix: str) -> list[RecipeKey]:
    return [
        RecipeKey(
            section,
            prefix + name,
            describe_field(field).removeprefix("a "),
            _default(field),
            field.description or "",
        )
        for name, field in model.model_fields.items()
        if not _is_section(field)
    ]


def _is_section(field: FieldInfo) -> bool:
    """Whether a field holds keys of its own."""
    kind = field.annotation
    return isinstance(kind, type) and (
        issubclass(kind, BaseModel) or hasattr(kind, "__dataclass_fields__")
    )


def _default(field: FieldInfo) -> str:
    """Return a field's default as one would write it in YAML."""
    if field.default is PydanticUndefined or field.default is None:
        return ""
    if isinstance(field.default, bool):
        return str(field.default).lower()
    if isinstance(field.default, tuple):
        return "[" + ", ".join(map(str, field.default)) + "]"
    return str(field.default)


def shipped_recipes() -> list[ShippedRecipe]:
    """Return the recipes that come with the package, by name."""
    return [_shipped(path) for path in sorted(RECIPES.glob("*.yaml"), key=lambda p: p.stem)]


def _shipped(path: Path) -> ShippedRecipe:
    recipe = load_recipe(Recipe, path)
    lines = path.read_text(encoding="utf-8").splitlines()
    about = lines[0].removeprefix("#").strip() if lines[0].startswith("#") else ""
    # An optimizer that updates rows no batch touched: see pipeline/refusals.py.
    plain = "adamw" in recipe.tables.optimizers()
    schedule = "plain loop only" if plain else recipe.train.schedule
    return ShippedRecipe(
        path.stem, recipe.task, recipe.model.kind, recipe.data or "", schedule, about
    )


def recipe_text(name: str) -> str:
    """Return the text of a recipe, which is given by path or by the name of a shipped one."""
    return recipe_path(name).read_text(encoding="utf-8")


def section_meaning(section: str) -> str:
    """Return one line about a section of a recipe."""
    if section == "tasks.NAME":
        return "one predicted action of a ranking recipe"
    return (Recipe.model_fields[section].description or "") if section else "the recipe itself"


def reference_page() -> str:
    """Return the whole page docs/reference/recipe.md."""
    text = HEAD + "".join(
        f"| `{one.name}` | {one.task} | {one.model} | {one.data} | {one.schedule} | {one.about} |\n"
        for one in shipped_recipes()
    )
    section = None
    for key in recipe_keys():
        if key.section != section:
            section = key.section
            about = section_meaning(section)
            title = f"`{section}`: {about}" if section else "The recipe itself"
            text += f"\n## {title}\n\n{TABLE}"
        meaning = key.meaning.replace("<", "&lt;")
        text += f"| `{key.key}` | {key.values} | {key.default} | {meaning} |\n"
    return text
