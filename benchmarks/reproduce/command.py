"""The command that trains the recipes of published tables again and prints both.

Touch this when it gets another flag; training and printing are in bench.py.
"""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from benchmarks.reproduce import bench
from slipstream import api
from slipstream.cli.data_commands import Ticker

console = Console(highlight=False)


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
    data: Annotated[Path, typer.Option(help="Prepared data; prepared when missing.")] = Path(
        "data/ml-1m"
    ),
    out: Annotated[Path, typer.Option(help="Where the runs go; finished ones are kept.")] = Path(
        "runs/reproduce"
    ),
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write rows, samples and claims to this file.")
    ] = None,
) -> None:
    """Train the shipped recipes over several seeds and print them with the published rows.

    The epoch is chosen on the validation item. The whole catalogue is ranked, seen items are
    filtered. Each recipe has two rows: the time of the request known to the model, and hidden.
    """
    if not (data / "store.json").exists():
        with Ticker() as progress:
            api.prepare(dataset, data, progress=progress)
    store = api.open_store(data)
    bench.reproduce(
        store,
        recipe or list(bench.RECIPES[dataset]),
        seeds,
        out,
        console,
        tuple(overrides or ()),
        json_path,
    )
