"""The `slipstream` command: gathers the groups in `slipstream.cli` and turns our errors into one
sentence.
"""

import importlib
import pkgutil
import sys

import typer
from rich.console import Console

from slipstream import __version__, cli
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
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Train and serve generative recommenders."""


def _gather() -> None:
    """Every module of `slipstream.cli` adds its own commands through `register(app)`."""
    for module in sorted(
        info.name for info in pkgutil.iter_modules(cli.__path__) if info.name != "app"
    ):
        importlib.import_module(f"slipstream.cli.{module}").register(app)


def run_command(arguments: list[str] | None = None) -> int:
    """Run one command (default: this process's arguments) and say how it ended.

    A `SlipstreamError` becomes `error: …` and 1; Ctrl-C ends with 130 and no traceback.
    """
    _gather()
    try:
        app(arguments)
        return 0
    except (
        SystemExit
    ) as end:  # how typer ends: 0, 2 for a wrong call (it has said why), 130 for Ctrl-C
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except SlipstreamError as error:
        _complain(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        _complain("stopped by Ctrl-C")
        return 130


def _complain(sentence: str) -> None:
    Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(sentence)


def main() -> None:
    """Entry point of the `slipstream` command."""
    sys.exit(run_command())
