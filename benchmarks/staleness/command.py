"""`slipstream study`: what stale rows cost, and what each way of choosing negatives is worth, over
seeds.
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

console = Console(highlight=False, soft_wrap=True)
study = typer.Typer(
    no_args_is_help=True, help="Train the same thing in many ways and compare with intervals."
)


def register(app: typer.Typer) -> None:
    """Add the group to the command line."""
    app.add_typer(study, name="study")


@study.callback()
def _group() -> None:
    """Train the same thing in many ways and compare with intervals."""


@study.command()
def staleness(
    out: Annotated[
        Path,
        typer.Option(help="Where results, tables and plots go; finished runs are not done again."),
    ] = Path("runs/staleness"),
    data: Annotated[
        Path,
        typer.Option(
            help="Folder of the prepared stores ml-1m and kuairand-pure; prepared when they are "
            "not there."
        ),
    ] = Path("data"),
    seeds: Annotated[int, typer.Option(min=2, max=20, help="Seeds of every variant.")] = 5,
    datasets: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this problem: ml-1m, kuairand-pure, zipf-hot, control…; may be repeated."
        ),
    ] = None,
    variants: Annotated[
        list[str] | None,
        typer.Option(help="Only this variant beside synchronous; may be repeated."),
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=1, max=64, help="Single-rank runs side by side, one thread each.")
    ] = 2,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="A small made-up problem, two seeds: a first look, no evidence."
        ),
    ] = False,
    report: Annotated[
        bool,
        typer.Option("--report", help="Train nothing; write tables and plots of what is done."),
    ] = False,
) -> None:
    """Compare synchronous, prefetching, semi-asynchronous and replicated training over the same
    seeds and batches.

    Ctrl-C stops it; the same command goes on. Exact schedules must end with equal bits, or the
    command fails.
    """
    from benchmarks.staleness.cases import open_store
    from benchmarks.staleness.study import chosen_cases, run_study
    from slipstream.cli.data_commands import Ticker

    with Ticker() as ticker:
        for case in chosen_cases(datasets or (), quick):
            open_store(case, data, out, ticker)
    summary = run_study(
        out,
        data,
        seeds=2 if quick else seeds,
        datasets=datasets or (),
        variants=variants,
        jobs=jobs,
        quick=quick,
        report_only=report,
    )
    console.print((out / "staleness.md").read_text(encoding="utf-8"), markup=False)
    console.print(
        f"written: {out / 'staleness.json'}, {out / 'staleness.md'}, {out / 'differences.png'}, "
        f"{out / 'collisions.png'}"
    )
    if not summary["exact_schedules_exact"]:
        console.print(
            "[bold]an exact schedule ended with other bits than its partner: see the last "
            "column[/bold]"
        )
        raise typer.Exit(1)


@study.command()
def negatives(
    out: Annotated[
        Path, typer.Option(help="Where results and the table go; finished runs are not done again.")
    ] = Path("runs/negatives"),
    data: Annotated[
        Path,
        typer.Option(help="Folder of the prepared store ml-1m; prepared when it is not there."),
    ] = Path("data"),
    seeds: Annotated[int, typer.Option(min=1, max=20, help="Seeds of every option.")] = 3,
    options: Annotated[
        list[str] | None, typer.Option(help='Only this option ("32 own, k = 4"…); may be repeated.')
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Another length than the study's own five.")
    ] = None,
) -> None:
    """Compare own, shared, rounded and differently drawn negatives on MovieLens-1M: HR@10 and
    NDCG@10 beside what a step costs.

    About a minute a run on one core. Ctrl-C stops it; the same command goes on.
    """
    from benchmarks.negative_quality.study import run_study
    from benchmarks.staleness.cases import ML_1M, open_store
    from slipstream.cli.data_commands import Ticker

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
