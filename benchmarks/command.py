"""Runs a benchmark from the command line: `python -m benchmarks.NAME`, from the project's root.

Touch this when every benchmark should take another flag. Errors end as those of `slipstream` do.
"""

import sys
from collections.abc import Callable
from typing import Any

import typer

from slipstream.cli.app import run_command
from slipstream.cli.bench_commands import Measure, measurement_app


def run_measurement(measure: Measure, text: str | None) -> None:
    """Run a function that measures, with the flags --json [PATH] and --quick, and exit."""
    sys.exit(run_command(program=measurement_app(measure, text)))


def run_function(function: Callable[..., Any]) -> None:
    """Run a function whose parameters are flags of its own, and exit."""
    sys.exit(run_command(program=function_app(function)))


def function_app(function: Callable[..., Any]) -> typer.Typer:
    """Make a program of one function whose parameters are the flags."""
    program = typer.Typer(
        add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich"
    )
    program.command()(function)
    return program
