"""What reporting commands share: the flag --json and how JSON, ages and figures are printed.

Touch this when every command should print one of them in another way.
"""

import json
import math
from typing import Annotated, Any

import typer

JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print JSON to standard output instead of tables.")
]


def print_json(value: Any) -> None:
    """Print a value as JSON that every reader accepts: what is no number is null."""
    typer.echo(json.dumps(plain(value), indent=2, allow_nan=False))


def plain(value: Any) -> Any:
    """Return a value with infinities and NaN as None."""
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def show_age(seconds: float) -> str:
    """Return a time that has passed in its largest unit: `3 h`."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def show_figure(value: Any) -> str:
    """Return a figure for a table: four digits for shares, grouped digits for counts."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 2 else f"{value:,.0f}"
    return str(value)
