"""The command that trains the recipes of published tables again and prints both.

Touch this when it gets another flag; training and printing are in bench.py.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from benchmarks.reproduce import bench
from slipstream import api
from slipstream.cli.data_commands import Ticker
from slipstream.data.store import SequenceStore
from slipstream.errors import SlipstreamError

console = Console(highlight=False)
# The fewest ratings of a movie that is kept, and the folder of the store.
CATALOGUES = {"all": (1, "ml-1m-all"), "sasrec": (5, "ml-1m")}


def reproduce(
    dataset: Annotated[Literal["ml-1m"], typer.Argument(help="The table to reproduce.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Change keys of every recipe."),
    ] = None,
    recipe: Annotated[
        list[str] | None, typer.Option(help="Only this recipe; may be given several times.")
    ] = None,
    catalogue: Annotated[
        list[str] | None,
        typer.Option(
            help="all: the 3,706 rated movies; sasrec: the 3,416 with five ratings or more. "
            "Default: both."
        ),
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=1, max=100, help="Seeds per recipe; the table shows mean and spread.")
    ] = 5,
    jobs: Annotated[
        int, typer.Option(min=1, max=256, help="Trainings at a time, each in its own process.")
    ] = 1,
    data: Annotated[Path, typer.Option(help="Prepared data; prepared when missing.")] = Path(
        "data"
    ),
    out: Annotated[Path, typer.Option(help="Where the runs go; finished ones are kept.")] = Path(
        "runs/reproduce"
    ),
    recorded: Annotated[
        Path | None,
        typer.Option(help="A result of this command; its runs are not made again."),
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write rows, samples and claims to this file.")
    ] = None,
) -> None:
    """Train the shipped recipes over several seeds and print them with the published rows.

    The epoch is chosen on the validation item. The whole catalogue is ranked, seen items are
    filtered. A recipe that looks from the request's time has three rows: that time known, the same
    weights with it hidden, and weights that were trained without it.
    """
    stores = {
        name: _store(dataset, data, name) for name in choose_catalogues(catalogue or CATALOGUES)
    }
    bench.reproduce(
        stores,
        recipe or list(bench.RECIPES[dataset]),
        seeds,
        out,
        console,
        tuple(overrides or ()),
        json_path,
        jobs,
        recorded,
    )


def choose_catalogues(names: Iterable[str]) -> list[str]:
    """Return known catalogues, each once."""
    chosen = list(dict.fromkeys(names))
    for name in chosen:
        if name not in CATALOGUES:
            raise SlipstreamError(f"there is no catalogue '{name}'; name {' or '.join(CATALOGUES)}")
    return chosen


def _store(dataset: str, data: Path, catalogue: str) -> SequenceStore:
    """Open the store of a catalogue, prepared on first use."""
    rarest, name = CATALOGUES[catalogue]
    directory = data / name
    if not (directory / "store.json").exists():
        with Ticker() as progress:
            api.prepare(dataset, directory, min_item_count=rarest, progress=progress)
    return api.open_store(directory)
