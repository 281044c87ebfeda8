"""`slipstream recipes`: the recipes that ship, one of them, or every key a recipe may have.

Touch this when they are shown in another way; they come from training/recipe_reference.py.
"""

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from slipstream.cli.output import JsonFlag, print_json
from slipstream.errors import SlipstreamError


def recipes(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Print this recipe: a shipped one's name, or a file.", metavar="[NAME]"
        ),
    ] = None,
    keys: Annotated[
        bool, typer.Option("--keys", help="Every key of a recipe: values, default, meaning.")
    ] = False,
    json: JsonFlag = False,
) -> None:
    """List the recipes that ship, print one, or explain every key.

    Examples: slipstream recipes ml-1m-hstu > mine.yaml; slipstream recipes --keys
    """
    from slipstream.training import recipe_reference

    if name is not None and keys:
        raise SlipstreamError("NAME prints one recipe and --keys every key; choose one")
    if name is not None:
        _print_recipe(name, json)
    elif json:
        found = recipe_reference.recipe_keys() if keys else recipe_reference.shipped_recipes()
        print_json([asdict(one) for one in found])
    elif keys:
        _print_keys()
    else:
        _print_list()


def _print_recipe(name: str, json: bool) -> None:
    from slipstream.config import load_recipe
    from slipstream.training.recipe import Recipe
    from slipstream.training.recipe_reference import recipe_text

    if json:
        print_json(load_recipe(Recipe, name).model_dump(mode="json"))
    else:
        typer.echo(recipe_text(name), nl=False)


def _print_keys() -> None:
    from slipstream.training.recipe_reference import recipe_keys, section_meaning

    console = Console(highlight=False)
    found = recipe_keys()
    for section in dict.fromkeys(key.section for key in found):
        about = section_meaning(section)
        title = f"{section}: {about}" if section else about
        table = Table(title=title, title_justify="left", show_lines=False)
        for heading in ("key", "values", "default", "meaning"):
            table.add_column(heading, overflow="fold")
        for key in found:
            if key.section == section:
                table.add_row(key.key, key.values, key.default, key.meaning)
        console.print(table, markup=False)


def _print_list() -> None:
    from slipstream.training.recipe_reference import shipped_recipes

    console = Console(highlight=False)
    for one in shipped_recipes():
        facts = f"{one.task}, {one.model}, {one.data or 'any data'}, schedule: {one.schedule}"
        console.print(f"[bold]{one.name}[/bold]  {facts}")
        console.print(Padding(Text(one.about), (0, 0, 0, 4)))
    console.print("next: slipstream recipes NAME > mine.yaml, or slipstream train NAME data=DIR")
