"""`slipstream train | evaluate | recommend | export`: the commands of one run.

Touch this when such a command gets another flag or prints something else; the work is in api.py.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from slipstream.cli.output import JsonFlag, print_json
from slipstream.errors import SlipstreamError
from slipstream.files import check_output, read_json

if TYPE_CHECKING:
    from slipstream import api

RunArgument = Annotated[
    Path, typer.Argument(help="A run's directory, for example runs/ml-1m-hstu.", show_default=False)
]
console = Console(highlight=False)


def show_metrics(figures: dict[str, float], title: str) -> None:
    """Print metrics as a small table: one row per kind, one column per k (or task)."""
    console.print(f"[bold]{title}[/bold]")
    table = Table()
    columns = list(
        dict.fromkeys(
            name.partition("@")[2] or name.partition("/")[2]
            for name in figures
            if "@" in name or "/" in name
        )
    )
    kinds = list(
        dict.fromkeys(
            name.partition("@")[0].partition("/")[0]
            for name in figures
            if "@" in name or "/" in name
        )
    )
    table.add_column("")
    for column in columns:
        table.add_column(f"@{column}" if column.isdigit() else column, justify="right")
    for kind in kinds:
        values = [
            figures.get(f"{kind}@{column}", figures.get(f"{kind}/{column}")) for column in columns
        ]
        table.add_row(kind, *("" if value is None else f"{value:.4f}" for value in values))
    console.print(table)
    rest = {name: value for name, value in figures.items() if "@" not in name and "/" not in name}
    console.print(
        "   ".join(
            f"{name} {value:,.0f}" if value >= 2 else f"{name} {value:.4f}"
            for name, value in rest.items()
        )
    )


def train(
    recipe: Annotated[
        str, typer.Argument(help="A recipe file, or the name of a shipped one.", show_default=False)
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Change keys of the recipe: data=DIR, max_steps=200, model.dim=64 …",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Run directory; default runs/<name of the recipe>.")
    ] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Replace a run of another recipe or other data; the same is resumed."
        ),
    ] = False,
    json: JsonFlag = False,
) -> None:
    """Train a recipe. The same command again resumes, bit for bit.

    Example: slipstream train recipes/ml-1m-hstu.yaml data=data/ml-1m

    Many ranks: torchrun --nproc-per-node 4 -m slipstream train ml-1m-hstu data=data/ml-1m mesh=2x2
    """
    from slipstream import api
    from slipstream.training.telemetry import is_first_rank

    run = api.train(recipe, *(overrides or []), out=out, force=force)
    if not is_first_rank():
        return
    note = read_json(run.directory / "run.json")
    if json:
        told = ("name", "status", "step", "epoch", "seconds", "best_step", "metrics")
        report = {"run": str(run.directory), "report": str(run.directory / "report.html")}
        print_json({**report, **{name: note.get(name) for name in told}})
        return
    console.print(
        f"{note['status']} after {note['step']:,} steps, {note['seconds']:.0f} s; report: "
        f"{run.directory / 'report.html'}"
    )
    if note.get("metrics"):
        show_metrics(note["metrics"], f"Validation at the best epoch (step {note['best_step']:,})")
    console.print(f"next: slipstream evaluate {run.directory}")


def evaluate(
    run: RunArgument,
    split: Annotated[
        Literal["test", "validation"], typer.Option(help="Which held-out behaviours to predict.")
    ] = "test",
    sampled: Annotated[
        bool,
        typer.Option(
            "--sampled", help="SASRec's old protocol with 100 random items; its figures are higher."
        ),
    ] = False,
    hide_request_time: Annotated[
        bool,
        typer.Option(
            "--hide-request-time",
            help="Hide the time of the request from the model: what time_bias=next gains by it.",
        ),
    ] = False,
) -> None:
    """Evaluate a run: the whole catalogue ranked, seen items filtered, ties averaged."""
    from slipstream import api

    if sampled and hide_request_time:
        raise SlipstreamError("--sampled and --hide-request-time are two protocols; choose one")
    protocol: Literal["full", "sampled", "no_request_time"] = "full"
    protocol = "sampled" if sampled else "no_request_time" if hide_request_time else protocol
    title = (
        f"{run.name}: {split}"
        + {"full": "", "sampled": ", sampled", "no_request_time": ", request time hidden"}[protocol]
    )
    show_metrics(api.Run(run).evaluate(split, protocol=protocol), title)


def recommend(
    run: RunArgument,
    user: Annotated[
        str, typer.Option(help="The user's id as in the original data.", show_default=False)
    ],
    count: Annotated[int, typer.Option(min=1, max=1000, help="How many items to show.")] = 10,
    history: Annotated[
        int,
        typer.Option(
            min=0, max=10_000, help="How many of the latest behaviours to show next to them."
        ),
    ] = 10,
) -> None:
    """Recommend unseen items to a user, next to the history the model saw."""
    from slipstream import api

    opened = api.Run(run)
    show_recommendation(opened, user, count, history)


def show_recommendation(run: "api.Run", user: str, count: int, history: int) -> None:
    """Print history and recommendations side by side, newest behaviour first."""
    answer, items = run.recommend(user, count), run.store.items

    def label(row: int) -> str:
        return items.title(row) or str(items.id(row))

    recent = [label(row) for row in answer.history[::-1][:history]]
    best = [
        (label(row), f"{score:.3f}") for row, score in zip(answer.items, answer.scores, strict=True)
    ]
    table = Table(title=f"User {user}: {len(answer.history)} behaviours seen", title_justify="left")
    for heading in ("latest history", "recommended", "score"):
        table.add_column(heading, justify="right" if heading == "score" else "left")
    for place in range(max(len(recent), len(best))):
        left = recent[place] if place < len(recent) else ""
        table.add_row(left, *(best[place] if place < len(best) else ("", "")))
    console.print(table)


def export(
    run: RunArgument,
    out: Annotated[
        Path, typer.Option(help="Directory of the bundle to write.", show_default=False)
    ],
    data: Annotated[
        Path | None,
        typer.Option(help="Where the run's data are now, if they were moved since training."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the bundle in --out.")] = False,
    json: JsonFlag = False,
) -> None:
    """Write a run's best weights as a bundle, which serving opens.

    A bundle holds safetensors, the vocabulary and the recipe.
    """
    from slipstream import api

    check_output(out, "bundle", force=force, inputs=[run])  # before the weights are read
    bundle = api.Run(run, data).export(out, force=force)
    if json:
        print_json({"bundle": str(bundle), "version": bundle_version(bundle), "run": str(run)})
        return
    console.print(f"bundle {bundle} written, version {bundle_version(bundle)}")


def bundle_version(bundle: Path) -> str:
    """Read the version of a bundle without opening its weights."""
    from slipstream.bundle import DESCRIPTION

    return str(read_json(bundle / DESCRIPTION)["version"])
