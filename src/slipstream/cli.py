"""The `slipstream` command: gathers the groups in `slipstream.commands` and turns our errors into one sentence."""

import importlib
import pkgutil
import sys

import typer
from rich.console import Console

from slipstream import __version__, commands
from slipstream.errors import SlipstreamError

app = typer.Typer(
    name="slipstream",
    help="Train and serve generative recommenders. Start with `slipstream demo`.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    """Train and serve generative recommenders."""


def _gather() -> None:
    """Every module of `slipstream.commands` adds its own commands through `register(app)`."""
    for module in sorted(info.name for info in pkgutil.iter_modules(commands.__path__)):
        importlib.import_module(f"slipstream.commands.{module}").register(app)


def main() -> None:
    """Entry point. A `SlipstreamError` becomes `error: …` and exit 1; Ctrl-C ends with 130 and no traceback."""
    _gather()
    try:
        app()
    except SlipstreamError as error:
        Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(f"error: {error}")
        sys.exit(1)
    except KeyboardInterrupt:
        Console(stderr=True).print("stopped by Ctrl-C")
        sys.exit(130)
