"""`slipstream bench NAME`: every measured claim as a command. A module of `slipstream.bench` with
`run` and a docstring is one.
"""

import contextlib
import importlib
import pkgutil
import sys
from collections.abc import Callable
from json import dumps
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer
from typer.core import TyperCommand

from slipstream import bench

Json = Annotated[
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


def benchmarks() -> dict[str, ModuleType]:
    """Every benchmark by its command's name."""
    names = sorted(info.name for info in pkgutil.iter_modules(bench.__path__))
    modules = {name.replace("_", "-"): _opened(name) for name in names}
    return {
        name: module
        for name, module in modules.items()
        if module and hasattr(module, "run") and module.__doc__
    }


def _opened(name: str) -> ModuleType | None:
    """A benchmark's module; None where it needs an extra that is not installed."""
    try:
        return importlib.import_module(f"slipstream.bench.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("slipstream"):
            raise
        return None


class BenchCommand(TyperCommand):
    """Lets `--json` stand alone, meaning `--json -`: typer itself knows no option with an optional
    value.
    """

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        places = [
            i
            for i, arg in enumerate(args)
            if arg == "--json" and (i + 1 == len(args) or args[i + 1].startswith("--"))
        ]
        for place in reversed(places):
            args.insert(place + 1, "-")
        return super().parse_args(ctx, args)


def _command(module: ModuleType) -> Callable[..., None]:
    def command(json: Json = None, quick: Quick = False) -> None:
        if json != STANDARD_OUTPUT:
            module.run(quick, json)
            return
        with contextlib.redirect_stdout(
            sys.stderr
        ):  # tables go beside, so that standard output is the JSON alone
            result = module.run(quick, None)
        typer.echo(dumps(result, indent=1))

    command.__doc__ = module.__doc__
    return command


def register(app: typer.Typer) -> None:
    """Adds the group `bench` with one command per benchmark, and `all`."""
    group = typer.Typer(
        no_args_is_help=True,
        help="Measure: each command prints a table and, with --json, writes its figures.",
    )
    found = benchmarks()
    for name, module in found.items():
        group.command(name, cls=BenchCommand)(_command(module))

    @group.command("all")
    def run_all(quick: Quick = False) -> None:
        """Every benchmark, one after the other."""
        for module in found.values():
            module.run(quick, None)

    app.add_typer(group, name="bench")
