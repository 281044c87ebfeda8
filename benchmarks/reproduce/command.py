"""`slipstream reproduce`: published tables, trained again here and printed beside what others
report.
"""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

console = Console(highlight=False)


def register(app: typer.Typer) -> None:
    """Add this group's command."""
    app.command()(reproduce)


def reproduce(
    dataset: Annotated[Literal["ml-1m"], typer.Argument(help="The table to reproduce.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Change keys of every recipe."),
    ] = None,
    recipe: Annotated[
        list[str] | None, typer.Option(help="Only this recipe; may be given several times.")
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=1, max=100, help="Seeds per recipe; the table shows mean and spread.")
    ] = 3,
    data: Annotated[Path, typer.Option(help="Prepared data; made when it is not there.")] = Path(
        "data/ml-1m"
    ),
    out: Annotated[
        Path, typer.Option(help="Where the runs go; finished ones are not trained again.")
    ] = Path("runs/reproduce"),
) -> None:
    """Train the shipped recipes over several seeds and print them beside the published rows.

    Epoch chosen on the validation item, test item read once, whole catalogue ranked, seen items
    filtered.
    """
    from benchmarks.reproduce import bench
    from slipstream import api
    from slipstream.cli.data_commands import Ticker

    if not (data / "store.json").exists():
        with Ticker() as progress:
            api.prepare(dataset, data, progress=progress)
    store = api.open_store(data)
    bench.reproduce(
        store, recipe or list(bench.RECIPES[dataset]), seeds, out, console, tuple(overrides or ())
    )
