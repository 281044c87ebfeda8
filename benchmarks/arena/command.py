"""The command `python -m benchmarks.arena`.

Touch this when it gets another flag; contest.py runs the cells, report.py shows them.
"""

import contextlib
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from benchmarks.arena import report
from benchmarks.arena.contenders import choose_contenders
from benchmarks.arena.contest import Entry, Plan, choose_data, run_contest
from benchmarks.arena.summary import make_claims, make_rows
from slipstream.bench.harness import note
from slipstream.cli.app import run_command
from slipstream.cli.bench_commands import STANDARD_OUTPUT, JsonPath, MeasureCommand
from slipstream.errors import SlipstreamError
from slipstream.interrupts import terminated_as_interrupted

Names = list[str] | None


def arena(
    data: Annotated[
        Names, typer.Option(help="Data sets, several by commas or repeated; default: all.")
    ] = None,
    contenders: Annotated[
        Names,
        typer.Option(help="Contenders, or the beginnings of their names, such as rectools."),
    ] = None,
    minutes: Annotated[
        float, typer.Option(min=0.01, help="Training time that a run may take.")
    ] = 30.0,
    seeds: Annotated[
        int, typer.Option(min=1, max=100, help="Seeds of Slipstream's contenders; peers run one.")
    ] = 3,
    threads: Annotated[int, typer.Option(min=1, help="Threads of every contender.")] = 2,
    work: Annotated[
        Path, typer.Option(help="Environments, data and cells; finished cells are kept.")
    ] = Path("runs/arena"),
    checkout: Annotated[
        Path | None, typer.Option(help="A clone of Meta's research code, for research-hstu.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small and short: for a first look, not for a claim.")
    ] = False,
    recorded: Annotated[
        bool, typer.Option("--recorded", help="Run nothing; print what is recorded.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw quality over training time into this PNG.")
    ] = None,
    json_path: JsonPath = None,
) -> None:
    """Run installed peers and Slipstream on the same data and print one table a data set.

    Every peer is installed into an environment of its own below the work folder. Finished cells
    are kept: the same command goes on where it was stopped. The protocol is
    benchmarks/protocols/arena.md.
    """
    alone = json_path == STANDARD_OUTPUT
    with contextlib.redirect_stdout(sys.stderr) if alone else contextlib.nullcontext():
        result = (
            report.read_recorded()
            if recorded
            else _run(
                Plan(
                    choose_data(_words(data), quick=quick),
                    choose_contenders(_words(contenders), checkout=checkout, quick=quick),
                    work,
                    minutes,
                    1 if quick else seeds,
                    threads,
                    quick,
                ),
                None if alone else json_path,
            )
        )
        report.show(result, Console(width=report.WIDTH))
    if alone:
        typer.echo(json.dumps(result, indent=1))
    elif recorded and json_path is not None:
        report.write_result(result, json_path)
    if plot is not None:
        report.draw(result, plot)


def _words(values: Names) -> Names:
    """Return names that are given one by one or with commas between them."""
    if values is None:
        return None
    return [word.strip() for value in values for word in value.split(",") if word.strip()]


def _run(plan: Plan, json_path: Path | None) -> dict[str, Any]:
    """Run a contest; its JSON is written again after every contender.

    Rows of a file that is there already stay, unless their contender is run again.
    """
    there = json_path is not None and json_path.is_file()
    recorded = report.read_recorded(json_path)["rows"] if there and json_path else []

    def result_of(entries: list[Entry]) -> dict[str, Any]:
        rows = make_rows(entries, recorded, **report.origin(plan.threads, plan.minutes))
        return report.make_result(rows, make_claims(rows), plan.threads, plan.minutes)

    def finished(entries: list[Entry]) -> None:
        if json_path is not None:
            report.write_result(result_of(entries), json_path)

    with terminated_as_interrupted():
        entries = run_contest(plan, lambda text: note(escape(text)), finished)
    if not entries:
        raise SlipstreamError("no contender takes part in these data sets; name others")
    return result_of(entries)


def main() -> None:
    """Run the command and exit."""
    program = typer.Typer(
        add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich"
    )
    program.command(cls=MeasureCommand)(arena)
    sys.exit(run_command(program=program))
