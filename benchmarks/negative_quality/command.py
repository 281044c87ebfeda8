"""The command of the study of negatives: what each way of choosing them is worth, over seeds.

Touch this when the study gets another flag; the study itself is in study.py.
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.negative_quality.study import run_study
from benchmarks.staleness.cases import ML_1M, open_store
from slipstream.cli.data_commands import Ticker

console = Console(highlight=False, soft_wrap=True)


def negative_quality(
    out: Annotated[
        Path, typer.Option(help="Where results and the table go; finished runs are kept.")
    ] = Path("runs/negatives"),
    data: Annotated[
        Path,
        typer.Option(help="Folder of the prepared store ml-1m; prepared when missing."),
    ] = Path("data"),
    seeds: Annotated[int, typer.Option(min=1, max=20, help="Seeds of every option.")] = 3,
    options: Annotated[
        list[str] | None, typer.Option(help='Only this option ("32 own, k = 4"…); may be repeated.')
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Another length than the study's own five.")
    ] = None,
) -> None:
    """Compare ways of choosing negatives on MovieLens-1M: HR@10, NDCG@10, cost of a step.

    A run takes about a minute on one core. Ctrl-C stops it; the same command resumes.
    """
    with Ticker() as ticker:
        store = open_store(ML_1M, data, out, ticker)
        table = run_study(
            store,
            out,
            seeds=range(1, seeds + 1),
            options=options or (),
            epochs=epochs,
            progress=ticker,
        )
    console.print(table, markup=False)
    console.print(f"written: {out / 'negatives.md'}")
