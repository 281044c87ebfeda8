"""The `slipstream` command: the table of its commands, and errors as one sentence.

Touch this when a command is added, or when errors should end the process in another way. A module
of a command is imported only when the command is called, so that `slipstream --help` starts fast.
"""

import sys
from typing import Any

import typer

from slipstream import __version__
from slipstream.cli.lazy_group import CommandEntry, LazyGroup
from slipstream.errors import SlipstreamError
from slipstream.machine import wait_passively_where_crowded

COMMANDS = {
    name: CommandEntry(f"slipstream.cli.{place}", line)
    for name, place, line in (
        (
            "demo",
            "demo:demo",
            "Prepare data, train HSTU for about two minutes, evaluate, export and recommend.",
        ),
        ("data", "data_commands:data", "Prepare a log for training, and show what was prepared."),
        (
            "train",
            "run_commands:train",
            "Train a recipe. The same command again resumes, bit for bit.",
        ),
        (
            "tune",
            "tune_command:tune",
            "Search recipe keys: random trials, chosen by validation, never by the test split.",
        ),
        (
            "evaluate",
            "run_commands:evaluate",
            "Evaluate a run: the whole catalogue ranked, ties averaged, popularity beside it.",
        ),
        (
            "recommend",
            "run_commands:recommend",
            "Recommend items to a user, next to the history the model saw, or to all users.",
        ),
        (
            "export",
            "run_commands:export",
            "Write a run's best weights as a bundle, which serving opens.",
        ),
        (
            "recipes",
            "recipes_command:recipes",
            "List the recipes that ship, print one, or explain every key.",
        ),
        (
            "runs",
            "runs_commands:runs",
            "List the runs of a folder: data, status, step, figures and age.",
        ),
        (
            "compare",
            "runs_commands:compare",
            "Hold runs against each other: what differs in their recipes, their figures, their "
            "time.",
        ),
        (
            "serve",
            "serve_command:serve",
            "Serve a bundle over HTTP: instances behind a router.",
        ),
        (
            "ui",
            "ui_command:ui",
            "Show recommendations, runs, pipelines and the fleet on a web page of this machine.",
        ),
        (
            "history",
            "history_commands:history",
            "Fill a history store from prepared data, export it, and forget users.",
        ),
        ("client", "client_commands:client", "Ask a running server (`slipstream serve`)."),
        (
            "trace",
            "trace_command:trace",
            "Show what each lane of a run did in its last steps, and draw it.",
        ),
        (
            "simulate",
            "simulate_command:simulate",
            "Run schedules and serving policies on clusters and fleets you do not have.",
        ),
        (
            "doctor",
            "doctor_command:doctor",
            "Tell what works on this machine: kernels, compiler, memory, device, tools, and what "
            "to do.",
        ),
        (
            "plan",
            "plan_command:plan",
            "Plan training and serving: mesh, schedule, instances, memory, cost, and why.",
        ),
        ("bench", "bench_commands:bench", "Measure this machine: one table a command."),
    )
}
COMPUTING = ("demo", "train", "tune", "evaluate", "recommend", "export")
FROM_ROOT = "(from the project's root)"
MOVED = {
    "reproduce": f"python -m benchmarks.reproduce ml-1m {FROM_ROOT}",
    "study staleness": f"python -m benchmarks.staleness {FROM_ROOT}",
    "study negatives": f"python -m benchmarks.negative_quality {FROM_ROOT}",
    "study": "python -m benchmarks.staleness, or python -m benchmarks.negative_quality "
    f"{FROM_ROOT}",
}


class RootGroup(LazyGroup):
    """The commands of `slipstream`."""

    entries = COMMANDS
    moved = MOVED


app = typer.Typer(
    name="slipstream",
    cls=RootGroup,
    help="Train and serve generative recommenders. Start with `slipstream demo`.",
    no_args_is_help=True,
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
    """Train and serve generative recommenders. Start with `slipstream demo`."""


def run_command(arguments: list[str] | None = None, program: typer.Typer = app) -> int:
    """Run one command (default: this process's arguments) and return its exit code.

    A `SlipstreamError` becomes `error: …` and 1, a wrong call `error: …` and 2. Ctrl-C ends with
    130 and no traceback.
    """
    try:
        name = "slipstream" if program is app else None  # None: as the program was started
        code = program(arguments, prog_name=name, standalone_mode=False)
        return code if isinstance(code, int) else 0
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except SlipstreamError as error:
        _print_error(f"error: {error}")
        return 1
    except (KeyboardInterrupt, typer.Abort):
        _print_error("stopped by Ctrl-C")
        return 130
    except Exception as error:
        if not hasattr(error, "format_message"):  # of the library that reads the arguments
            raise
        return _explain_wrong_call(error)


def _explain_wrong_call(error: Any) -> int:
    """Print what is wrong with the arguments in a sentence; no arguments at all: the help."""
    path = "slipstream" if error.ctx is None else error.ctx.command_path
    message = error.format_message().strip().rstrip(".")
    if message:
        _print_error(f"error: {message[0].lower()}{message[1:]}; see {path} --help")
    return int(error.exit_code)


def _print_error(sentence: str) -> None:
    from rich.console import Console

    Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(sentence)


def main() -> None:
    """Run the `slipstream` command and exit."""
    words = sys.argv[1:]
    if words and words[0] in COMPUTING and "--help" not in words:
        wait_passively_where_crowded()  # before torch is imported
    sys.exit(run_command())
