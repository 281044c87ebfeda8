"""`slipstream tune`: search recipe keys, one trial after the other.

Touch this when the command gets another flag or prints something else; the search is in
training/tuning.py, the ranges in training/search_space.py.
"""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slipstream.cli.output import JsonFlag, print_json, show_figure

if TYPE_CHECKING:
    from slipstream.training.tuning import TuneResult


def tune(
    recipe: Annotated[
        str, typer.Argument(help="A recipe file, or the name of a shipped one.", show_default=False)
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Change keys of the recipe for all trials: data=DIR …"
        ),
    ] = None,
    over: Annotated[
        list[str] | None,
        typer.Option(
            "--over",
            metavar="KEY=RANGE",
            help="What to search, as often as needed: log(a,b), uniform(a,b), int(a,b) or "
            "choice(a,b,c).",
        ),
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="Recipes to try.")] = 16,
    halving: Annotated[
        bool,
        typer.Option(
            "--halving",
            help="Compare trials after shares of their length; the best third goes on.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="Another seed draws other trials.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Its directory; default tunes/<name of the recipe>.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Search recipe keys: random trials, chosen by validation, never by the test split.

    Each trial is an ordinary run. The same command again goes on where it stopped.

    Example: slipstream tune ml-1m-hstu data=data/ml-1m --over "optimizer.lr=log(1e-4,1e-2)"
    --over "model.dropout=choice(0.1,0.2,0.5)" --trials 16 --halving --out tunes/ml-1m
    """
    from slipstream import api
    from slipstream.config import load_recipe
    from slipstream.training.recipe import Recipe
    from slipstream.training.search_space import parse_space
    from slipstream.training.tuning import print_progress
    from slipstream.training.tuning import tune as tune_recipe

    space, base = parse_space(over or []), load_recipe(Recipe, recipe, overrides or [])
    found = tune_recipe(
        base,
        api.open_store(base.data),
        out or Path("tunes") / base.name,
        space,
        trials=trials,
        halving=halving,
        seed=seed,
        say=print_progress,
    )
    if json:
        print_json({**asdict(found), "directory": str(found.directory)})
        return
    console = Console(highlight=False)
    console.print(_trials_table(found))
    if not found.finished or found.best is None:
        console.print("stopped; run the same command again to go on from there")
        return
    console.print(
        f"best: {found.best.name}; its recipe: {found.directory / 'best.yaml'}, all curves: "
        f"{found.directory / 'report.html'}"
    )
    console.print(f"next: slipstream evaluate {found.directory / found.best.name}")


def _trials_table(found: "TuneResult") -> Table:
    """Return a line per trial, the best first."""
    table = Table()
    keys = list(found.trials[0].settings)
    for heading in ("trial", *keys, found.metric, "best step", "steps", "status"):
        table.add_column(heading, overflow="fold")
    for one in found.trials:
        cells = [
            one.name,
            *(str(one.settings[key]) for key in keys),
            show_figure(one.value),
            show_figure(one.best_step),
            f"{one.step:,}",
            one.status,
        ]
        table.add_row(*map(Text, cells))
    return table
