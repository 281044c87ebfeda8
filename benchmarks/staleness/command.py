"""The command of the staleness study: what old rows cost in quality, over seeds.

Touch this when the study gets another flag; the study itself is in study.py.
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.staleness.cases import open_store
from benchmarks.staleness.study import chosen_cases, run_study
from slipstream.cli.data_commands import Ticker

console = Console(highlight=False, soft_wrap=True)


def staleness(
    out: Annotated[
        Path,
        typer.Option(help="Where results, tables and plots go; finished runs are kept."),
    ] = Path("runs/staleness"),
    data: Annotated[
        Path,
        typer.Option(
            help="Folder of the prepared stores ml-1m and kuairand-pure; prepared when missing."
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
        typer.Option(help="Only this variant and synchronous; may be repeated."),
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=1, max=64, help="Single-rank runs side by side, one thread each.")
    ] = 2,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="A small synthetic problem, two seeds: a first look, not for a claim."
        ),
    ] = False,
    report: Annotated[
        bool,
        typer.Option(
            "--report", help="Train nothing; write tables and plots of the finished runs."
        ),
    ] = False,
) -> None:
    """Compare synchronous, stale and replicated training over the same seeds and batches.

    Ctrl-C stops it; the same command resumes. The command fails unless exact schedules end with
    the same bits.
    """
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
