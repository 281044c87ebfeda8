"""`slipstream runs` and `slipstream compare`: what was trained, side by side.

Touch this when their tables change; the figures come from training/comparison.py.
"""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slipstream.cli.output import JsonFlag, print_json, show_age, show_figure

if TYPE_CHECKING:
    from slipstream.training.comparison import RunComparison

FIRST_FIGURES = 2  # of an evaluation that `runs` shows
PREFERRED = ("HR@10", "NDCG@10")


def runs(
    directory: Annotated[Path, typer.Argument(help="Where to look for runs.")] = Path("runs"),
    json: JsonFlag = False,
) -> None:
    """List the runs of a folder: data, status, step, figures and age."""
    from slipstream.training.comparison import find_runs

    found = find_runs(directory)
    if json:
        print_json([asdict(run) for run in found])
        return
    console = Console(highlight=False)
    if not found:
        console.print(f"no run in {directory}; make one with: slipstream train RECIPE data=DIR")
        return
    table = Table()
    for heading in ("run", "data", "status", "step", "validation", "test", "age"):
        right = heading in ("step", "age")
        table.add_column(heading, justify="right" if right else "left", overflow="fold")
    for run in found:
        table.add_row(
            run.directory,
            Path(run.data).name,
            run.status,
            f"{run.step:,}",
            _first_figures(run.validation),
            _first_figures(run.test),
            show_age(run.age_seconds),
        )
    console.print(table)


def _first_figures(figures: dict[str, float]) -> str:
    """Return the figures one looks at first."""
    names = [name for name in PREFERRED if name in figures]
    names = names or [name for name in figures if "@" in name or "/" in name]
    return "  ".join(f"{name} {show_figure(figures[name])}" for name in names[:FIRST_FIGURES])


def compare(
    directories: Annotated[
        list[Path], typer.Argument(metavar="RUN RUN...", help="Two runs or more.")
    ],
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw their curves over each other into this page."),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Hold runs against each other: what differs in their recipes, their figures, their time.

    A star marks the best. Example: slipstream compare runs/ml-1m-hstu runs/ml-1m-sasrec
    """
    from slipstream.training.comparison import compare_runs

    found = compare_runs(directories)
    if report is not None:
        from slipstream.training.report import write_comparison

        write_comparison(directories, report)
    if json:
        print_json(asdict(found))
        return
    console = Console(highlight=False)
    console.print(_comparison_table(found))
    if not found.same_data:
        console.print(
            "warning: these runs were trained on different data, so their figures do not compare",
            style="yellow",
        )
    if report is not None:
        console.print(f"curves: {report}")


def _comparison_table(found: "RunComparison") -> Table:
    """Return one column for each run: recipe keys that differ, then figures, then time."""
    table = Table()
    table.add_column("")
    for run in found.runs:
        table.add_column(Text(run.directory), justify="right", overflow="fold")

    def add(name: str, values: list[Any], **style: Any) -> None:
        table.add_row(*(Text(text) for text in (name, *map(show_figure, values))), **style)

    for key, values in found.keys.items():
        add(key, [str(value) for value in values], end_section=key == list(found.keys)[-1])
    for split in ("validation", "test"):
        figures = getattr(found, split)
        for name, values in figures.items():
            best = found.best.get(f"{split} {name}", [])
            shown = [show_figure(v) + (" *" if i in best else "") for i, v in enumerate(values)]
            add(f"{split} {name}", shown, end_section=name == list(figures)[-1])
    add("status", [run.status for run in found.runs])
    add("steps", [f"{run.step:,}" for run in found.runs])
    add("seconds", [f"{run.seconds:,.0f}" for run in found.runs])
    return table
