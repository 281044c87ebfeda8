"""`slipstream trace RUN`: what each lane of a scheduled run did when, as figures and as a picture.

Touch this when the table or its wording changes; the figures come from pipeline/trace.py.
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from slipstream.cli.output import JsonFlag, print_json
from slipstream.errors import SlipstreamError


def trace(
    run: Annotated[
        Path, typer.Argument(help="Directory of a run trained with a schedule.", show_default=False)
    ],
    steps: Annotated[
        int, typer.Option(min=1, max=1000, help="How many of the last steps to draw.")
    ] = 4,
    json: JsonFlag = False,
) -> None:
    """Show what each lane of a run did in its last steps, and draw it.

    The picture is RUN/trace.png. RUN/trace.json opens in Perfetto.
    """
    from slipstream.pipeline.timeline import draw_timeline
    from slipstream.pipeline.trace import read_trace, shares

    path = run / "trace.json"
    if not path.exists():
        raise SlipstreamError(
            f"{run} has no trace.json; train with a schedule that has lanes, for example "
            "train.schedule=nested, to leave one"
        )
    intervals, about = read_trace(path)
    found = shares(intervals)
    if json:
        print_json({"run": str(run), **about, "shares": found})
        return
    title = f"{about.get('run', run.name)}, schedule {about.get('schedule', 'unknown')}"
    table = Table(title=title, title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in found.items():
        table.add_row(
            name, f"{1e3 * value:.2f} ms" if name.endswith("_seconds") else f"{100 * value:.1f} %"
        )
    console = Console()
    console.print(table)
    draw_timeline(run / "trace.png", intervals, title, steps)
    console.print(
        f"{run / 'trace.png'} drawn; {path} opens in Perfetto", soft_wrap=True, highlight=False
    )
