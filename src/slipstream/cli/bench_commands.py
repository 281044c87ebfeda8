"""`slipstream bench NAME`: what a user measures on the own machine.

Touch this when a measurement is added to slipstream/bench. Comparisons and studies are in the
project's folder benchmarks/; they take their flags from `measurement_app` here.
"""

import contextlib
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from slipstream.cli.lazy_group import CommandEntry, LazyGroup, make_command

JsonPath = Annotated[
    Path | None,
    typer.Option(
        "--json",
        help="Write the figures and raw samples to this file; without a file, to standard output.",
    ),
]
STANDARD_OUTPUT = Path("-")
Quick = Annotated[
    bool, typer.Option("--quick", help="Smaller and shorter: for a first look, not for a claim.")
]
Measure = Callable[[bool, Path | None], dict[str, Any]]

# Command: module of slipstream.bench, one line of help.
MEASUREMENTS = {
    "ingest": ("ingest_rate", "How fast and in how little memory a log becomes a store."),
    "kernels": ("kernels", "Jagged attention against the matmul peak, a loop and padded PyTorch."),
    "pointwise": ("pointwise_rate", "Losses, row operators, norm and gate against plain PyTorch."),
    "train-step": ("train_step", "A whole training step against the matmul peak and padding."),
}
COMPARISONS = (
    "balance",
    "chaos",
    "disk-table",
    "exchange",
    "negatives",
    "pipeline",
    "router",
    "serving",
    "tables",
)


class MeasureCommand(TyperCommand):
    """A command whose `--json` may stand alone, which means `--json -`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert `-` after each `--json` that no value follows; typer itself requires one."""
        places = [
            i
            for i, arg in enumerate(args)
            if arg == "--json" and (i + 1 == len(args) or args[i + 1].startswith("--"))
        ]
        for place in reversed(places):
            args.insert(place + 1, "-")
        return super().parse_args(ctx, args)


def measurement_app(measure: Measure, text: str | None) -> typer.Typer:
    """Make a program with the flags --json and --quick from a function that measures."""
    program = typer.Typer(
        add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich"
    )

    @program.command(cls=MeasureCommand, help=text)
    def command(json_path: JsonPath = None, quick: Quick = False) -> None:
        if json_path != STANDARD_OUTPUT:
            measure(quick, json_path)
            return
        with contextlib.redirect_stdout(sys.stderr):  # standard output gets the JSON alone
            result = measure(quick, None)
        typer.echo(json.dumps(result, indent=1))

    return program


class BenchGroup(LazyGroup):
    """The commands of `slipstream bench`."""

    entries = {
        name: CommandEntry(f"slipstream.bench.{module}:run", line)
        for name, (module, line) in MEASUREMENTS.items()
    } | {"all": CommandEntry(f"{__name__}:run_all", "Run every measurement in turn.")}
    moved = {
        name: f"python -m benchmarks.{name.replace('-', '_')} (from the project's root)"
        for name in COMPARISONS
    } | {"neighbours": "slipstream bench pointwise"}

    def load(self, name: str) -> Any:
        """Import one measurement and give it the flags of all."""
        if name not in MEASUREMENTS:
            return super().load(name)
        module = importlib.import_module(f"slipstream.bench.{MEASUREMENTS[name][0]}")
        return make_command(name, measurement_app(module.run, module.__doc__))


bench = typer.Typer(
    cls=BenchGroup,
    no_args_is_help=True,
    add_completion=False,
    help="Measure this machine: one table a command.",
    rich_markup_mode="rich",
)


@bench.callback()
def _group() -> None:
    """Measure this machine: one table a command.

    With --json, a command also writes its figures.
    """


def run_all(quick: Quick = False) -> None:
    """Run every measurement in turn."""
    for module, _ in MEASUREMENTS.values():
        importlib.import_module(f"slipstream.bench.{module}").run(quick, None)
