"""`slipstream train | evaluate | recommend | export`: the commands of one run.

Touch this when such a command gets another flag or prints something else; the work is in api/ and
training/.
"""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from slipstream.cli.output import JsonFlag, print_json
from slipstream.errors import SlipstreamError
from slipstream.files import check_output, read_json

if TYPE_CHECKING:
    from slipstream import api
    from slipstream.data.store import SequenceStore
    from slipstream.training.recipe import Recipe
    from slipstream.training.recommendation import Recommendation
    from slipstream.training.recommender import Recommender

RunArgument = Annotated[
    Path, typer.Argument(help="A run's directory, for example runs/ml-1m-hstu.", show_default=False)
]
RepeatOption = Annotated[
    Literal["exclude", "allow"] | None,
    typer.Option(help="May seen items be recommended? Default: as the recipe says."),
]
DataOption = Annotated[
    Path | None,
    typer.Option(help="Where the run's data lies now; default: where it was trained."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
SERVER = "http://127.0.0.1:8000"
PROTOCOLS = {"full": [], "sampled": ["sampled"], "no_request_time": ["request time hidden"]}
console = Console(highlight=False)


def show_metrics(figures: dict[str, float], title: str) -> None:
    """Print metrics as a small table: a row per kind, popularity below it, a column per k or task.

    A second line has the counts and the shares of repeats and cold users and items.
    """
    from slipstream.training.popularity import BASELINE
    from slipstream.training.report import COUNTS, SHARES, show_figure

    console.print(f"[bold]{title}[/bold]")
    cells = {name: _kind_and_column(name) for name in figures if "@" in name or "/" in name}
    columns = list(dict.fromkeys(column for _, column in cells.values()))
    table = Table()
    table.add_column("")
    for column in columns:
        table.add_column(f"@{column}" if column.isdigit() else column, justify="right")
    values = {place: f"{figures[name]:.4f}" for name, place in cells.items()}
    kinds = dict.fromkeys(kind.removeprefix(BASELINE) for kind, _ in cells.values())
    for kind in (prefix + kind for kind in kinds for prefix in ("", BASELINE)):
        row = [values.get((kind, column), "") for column in columns]
        if any(row):
            table.add_row(kind, *row, style="dim" if kind.startswith(BASELINE) else "")
    console.print(table)
    rest = [name for name in figures if name not in (*cells, *COUNTS, *SHARES)]
    shown = [
        f"{name} {show_figure(name, figures[name])}"
        for name in [*rest, *COUNTS, *SHARES[1:]]
        if name in figures
    ]
    console.print("   ".join(shown).replace("cold_", "cold "))


def _kind_and_column(name: str) -> tuple[str, str]:
    """Split HR@10 and AUC/click into what is measured and at what."""
    kind, _, column = name.partition("@") if "@" in name else name.partition("/")
    return kind, column


def describe_rules(figures: dict[str, float], recipe: "Recipe", repeat: str, split: str) -> str:
    """Return the lines on how repeats are treated and which behaviours the model sees."""
    share = figures.get("repeats", 0.0)
    line = f"repeat: {repeat}"
    if share > 0.005:
        line += f"; {share:.1%} of the {split} items are repeats"
        if repeat == "exclude" and recipe.task == "retrieval":
            line += ", which can never be hit; repeat=allow would recommend them"
    window = f"window: {recipe.window}, at most {recipe.sampler.max_len:,} behaviours"
    return f"{line}\n{window}"


def open_with_data(run: Path, data: Path | None) -> "tuple[Recipe, SequenceStore, Recommender]":
    """Open a run, on the data where it was trained or where it lies now."""
    from slipstream.data.store import SequenceStore
    from slipstream.training.run import open_run

    return open_run(run, None if data is None else SequenceStore.open(data))


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

    run = api.train_recipe(recipe, *(overrides or []), out=out, force=force)
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
    url: Annotated[
        str | None,
        typer.Argument(
            help=f"Where the server of --as-served is; default $SLIPSTREAM_URL, else {SERVER}."
        ),
    ] = None,
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
    as_served: Annotated[
        bool,
        typer.Option(
            "--as-served",
            help="Measure a running server instead, which serves this run: --as-served URL. "
            "An API key is read from $SLIPSTREAM_API_KEY.",
        ),
    ] = False,
    repeat: RepeatOption = None,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Evaluate a run: the whole catalogue ranked, ties averaged, popularity beside it.

    Seen items are filtered as the recipe's `repeat` says.
    """
    from slipstream.training.run_evaluation import EvaluationProtocol, evaluate_run

    if sampled and (hide_request_time or as_served):
        raise SlipstreamError(
            "--sampled is a protocol of its own; leave out --hide-request-time and --as-served"
        )
    if url is not None and not as_served:
        raise SlipstreamError(f"'{url}' is a server only with --as-served; add it, or leave it out")
    url = url or os.environ.get("SLIPSTREAM_URL") or SERVER
    protocol: EvaluationProtocol = "full"
    protocol = "sampled" if sampled else "no_request_time" if hide_request_time else protocol
    recipe, store, recommender = open_with_data(run, data)
    rule = repeat or recipe.repeat
    told = [run.resolve().name, split, *PROTOCOLS[protocol]]
    slices: list[dict[str, Any]] = []
    if as_served:
        figures, version = _ask_server(
            url, run, (recipe, store, recommender), split, repeat, hide_request_time
        )
        told.append(f"as served by {url}, version {version}")
    else:
        done = evaluate_run(
            run, recipe, store, recommender, split, protocol=protocol, repeat=repeat
        )
        figures, slices = done.figures, done.slices
    if as_json:
        answer = {"run": str(run), "split": split, "protocol": protocol, "as_served": as_served}
        answer |= {"repeat": rule, "window": recipe.window, "figures": figures, "slices": slices}
        typer.echo(json.dumps(answer, indent=1))
        return
    show_metrics(figures, ", ".join(told))
    if not sampled:
        console.print(describe_rules(figures, recipe, rule, split), soft_wrap=True)


def _ask_server(
    url: str,
    run: Path,
    opened: "tuple[Recipe, SequenceStore, Recommender]",
    split: Literal["test", "validation"],
    repeat: Literal["exclude", "allow"] | None,
    hide_request_time: bool,
) -> tuple[dict[str, float], str]:
    """Measure a server with a progress bar, and keep the figures with the run's."""
    from rich.progress import Progress

    try:
        from slipstream.cli.as_served import evaluate_as_served
    except ModuleNotFoundError as error:
        raise SlipstreamError(
            f"--as-served needs the libraries of serving ({error.name} is missing): pip install "
            "'slipstream[serving]'"
        ) from error
    from slipstream.training.run_evaluation import record_evaluation

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("asking", total=None)
        figures, version = evaluate_as_served(
            url,
            *opened,
            split,
            key=os.environ.get("SLIPSTREAM_API_KEY", "").split(",")[0] or None,
            repeat=repeat,
            hide_request_time=hide_request_time,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if repeat in (None, opened[0].repeat) and not hide_request_time:
        record_evaluation(run, {f"{split}_as_served": figures})
    return figures, version


def recommend(
    run: RunArgument,
    user: Annotated[
        str | None,
        typer.Option(help="The user's id as in the original data.", show_default=False),
    ] = None,
    every_user: Annotated[
        bool,
        typer.Option(
            "--all", help="Every user of the data, into the Parquet file --out. Can be resumed."
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="With --all: the file to write; columns user, items, scores."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file in --out.")] = False,
    count: Annotated[int, typer.Option(min=1, max=1000, help="How many items to show.")] = 10,
    history: Annotated[
        int,
        typer.Option(
            min=0, max=10_000, help="How many of the latest behaviours to show next to them."
        ),
    ] = 10,
    repeat: RepeatOption = None,
    request_time: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="The moment of the request in seconds since 1970; default: the last behaviour's.",
        ),
    ] = None,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Recommend items to a user, next to the history the model saw, or to all users.

    Seen items are left out as the recipe's `repeat` says.

    Example: slipstream recommend runs/ml-1m-hstu --user 42

    Everybody: slipstream recommend runs/ml-1m-hstu --all --out top.parquet --count 20

    A stopped --all goes on where it was by the same command. Catalogues larger than memory are read
    in tiles.
    """
    from slipstream.training.recommendation import recommend_user

    if every_user:
        _recommend_all(run, user, out, count, repeat, request_time, data, force, as_json)
        return
    if user is None:
        raise SlipstreamError(
            "recommend needs a user; give --user ID, or --all --out top.parquet for everybody"
        )
    if out is not None or force:
        raise SlipstreamError("--out and --force belong to --all; add it, or leave them out")
    recipe, store, recommender = open_with_data(run, data)
    times = None if request_time is None else [request_time]
    answer = recommend_user(
        recommender, store, store.users.row(user), count, repeat=repeat, request_times=times
    )
    if not as_json:
        print_recommendation(store, answer, user, history)
        return
    items = [
        {"rank": rank, "item": store.items.id(row), "score": score, "title": store.items.title(row)}
        for rank, (row, score) in enumerate(zip(answer.items, answer.scores, strict=True), 1)
    ]
    latest = [store.items.id(row) for row in answer.history[::-1][:history]]
    told = {"user": store.users.id(answer.user), "repeat": repeat or recipe.repeat}
    typer.echo(json.dumps({**told, "items": items, "latest_history": latest}, indent=1))


def _recommend_all(
    run: Path,
    user: str | None,
    out: Path | None,
    count: int,
    repeat: str | None,
    request_time: int | None,
    data: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write the recommendations of all users to a file."""
    from slipstream.progress import Ticker
    from slipstream.training.recommend_all import check_out, recommend_all

    if out is None:
        raise SlipstreamError("--all writes a file; name it with --out top.parquet")
    if user is not None or request_time is not None:
        raise SlipstreamError(
            "--all asks for everybody after the last behaviour; leave out --user and --request-time"
        )
    check_out(out, force=force)  # before the weights are read
    _, store, recommender = open_with_data(run, data)
    with Ticker() as ticker:
        users = recommend_all(
            recommender, store, out, count, repeat=repeat, force=force, tell=ticker
        )
    if as_json:
        typer.echo(json.dumps({"out": str(out), "users": users, "count": count}))
        return
    console.print(f"{out}: {users:,} users with at most {count} items each")


def show_recommendation(run: "api.Run", user: str, count: int, history: int) -> None:
    """Print history and recommendations of a run's user side by side."""
    from slipstream.training.recommendation import recommend_user

    answer = recommend_user(run.recommender, run.store, run.store.users.row(user), count)
    print_recommendation(run.store, answer, user, history)


def print_recommendation(
    store: "SequenceStore", answer: "Recommendation", user: str, history: int
) -> None:
    """Print history and recommendations side by side, newest behaviour first."""

    def label(row: int) -> str:
        return store.items.title(row) or str(store.items.id(row))

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
    from slipstream.training.run_directory import find_store

    check_output(out, "bundle", force=force, inputs=[run])  # before the weights are read
    bundle = api.Run(run, find_store(run, data)).export(out, force=force)
    if json:
        print_json({"bundle": str(bundle), "version": bundle_version(bundle), "run": str(run)})
        return
    console.print(f"bundle {bundle} written, version {bundle_version(bundle)}")


def bundle_version(bundle: Path) -> str:
    """Read the version of a bundle without opening its weights."""
    from slipstream.bundle import DESCRIPTION

    return str(read_json(bundle / DESCRIPTION)["version"])
