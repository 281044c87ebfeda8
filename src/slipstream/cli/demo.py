"""`slipstream demo`: from nothing to recommendations, each step also a command of its own.

Touch this when the demo should show another step; its recipe is recipes/demo.yaml.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from slipstream.errors import SlipstreamError
from slipstream.files import check_output, kind_of_directory

if TYPE_CHECKING:
    from slipstream.data.store import SequenceStore

console = Console(highlight=False)
STORY = """\
This demo downloads MovieLens-1M (6 MB; without a network it makes users up), trains a small HSTU on
it for two to four minutes, measures it, writes a bundle and recommends films to one user.{last}
All of it goes to {out}. Ctrl-C stops it; the same command goes on.
"""
SERVED = " Then it shows the\nweb page, until Ctrl-C."
REPEATS = 15  # of each way to rank, in turn
KNOWN = {
    "ml-1m": "MovieLens-1M",
    "ml-latest-small": "MovieLens latest-small",
    "synthetic": "synthetic users",
}


def demo(
    source: Annotated[
        Path | None,
        typer.Option(
            help="MovieLens latest-small on disk, for when MovieLens-1M cannot be downloaded."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where data, run and bundle go.")] = Path("runs/demo"),
    user: Annotated[
        str | None, typer.Option(help="Whose recommendations to show; default: the first user.")
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="End by serving the web page, until Ctrl-C.")
    ] = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the web page; 0 takes a free one.")
    ] = 8080,
    force: Annotated[
        bool,
        typer.Option("--force", help="Replace a run of another recipe that an earlier demo left."),
    ] = False,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Change keys of the demo recipe, for example epochs=2."
        ),
    ] = None,
) -> None:
    """Prepare data, train HSTU for about two minutes, evaluate, export and recommend."""
    from slipstream import api
    from slipstream.cli.run_commands import bundle_version, show_metrics, show_recommendation

    console.print(STORY.format(out=out, last=SERVED if serve else ""))
    if kind_of_directory(out) is not None:
        raise SlipstreamError(
            f"{out} holds a {kind_of_directory(out)}, so the demo does not write into it; give "
            "another --out"
        )
    for name in KNOWN:
        check_output(out / name, "store", force=True)
    check_output(out / "bundle", "bundle", force=True)
    data = demo_data(out, source)
    console.rule("train")
    run = api.train_recipe("demo", *(overrides or []), data=data, out=out / "run", force=force)
    console.rule("evaluate")
    show_metrics(run.evaluate("test"), "Test item, whole catalogue ranked, seen items filtered")
    console.rule("export")
    bundle = run.export(out / "bundle", force=True)
    console.print(
        f"bundle {bundle}, version {bundle_version(bundle)}; report {run.directory / 'report.html'}"
    )
    console.rule("recommend")
    show_recommendation(run, user or str(run.store.users.id(0)), count=10, history=10)
    console.rule("relay")
    console.print(compare_relay(bundle, run.store))
    console.rule("next")
    console.print(f"report: {run.directory / 'report.html'}", soft_wrap=True)
    if serve:
        from slipstream.cli.ui_command import ui

        ui([str(out)], port=port, data=data)
    else:
        console.print(f"the web page: slipstream ui {out} --data {data}", soft_wrap=True)


def compare_relay(bundle: Path, store: "SequenceStore") -> str:
    """Rank for the user with the longest history, with and without a prefix computed ahead."""
    import statistics
    import time

    import numpy as np

    from slipstream.history.user_history import History
    from slipstream.serving.engine.engine import Engine

    engine = Engine(bundle)
    row = int(np.argmax(store.lengths_U))
    begin, end = (int(place) for place in store.offsets_U1[row : row + 2])
    cut = slice(max(begin, end - engine.max_len), end)
    items = np.array([store.items.id(item) for item in store.items_N[cut].tolist()], dtype=object)
    actions = {name: values_N[cut] for name, values_N in store.actions.items()}
    history = History(items, store.timestamps_N[cut].copy(), actions)
    candidates = engine.items.originals(np.arange(min(100, len(engine.items))))
    prefix = engine.prefill(history)
    scores: list[np.ndarray] = []
    times: dict[str, list[float]] = {"in line": [], "relay": []}
    for _ in range(REPEATS):
        for name, past, recent in (("in line", None, history), ("relay", prefix, None)):
            started = time.perf_counter()
            found = engine.rank(past, recent, candidates)
            times[name].append(1_000 * (time.perf_counter() - started))
            scores.append(found[engine.tasks[0]])
    medians = {name: statistics.median(values) for name, values in times.items()}
    difference = max(float(np.abs(each - scores[0]).max()) for each in scores)
    return (
        f"ranking {len(candidates)} items after {len(history)} behaviours: "
        f"{medians['in line']:.1f} ms in line, {medians['relay']:.1f} ms where the history was "
        f"computed while retrieval ran; largest difference of a score {difference:.1g}"
    )


def demo_data(out: Path, source: Path | None) -> Path:
    """Prepare MovieLens-1M, or else latest-small from `source`, or else synthetic data."""
    from slipstream import api
    from slipstream.progress import Ticker

    console.rule("data")
    for name, title in KNOWN.items():
        place = source if name == "ml-latest-small" else None
        if name == "ml-latest-small" and source is None:
            continue
        target = out / name
        if (target / "store.json").exists():
            console.print(f"{title}, prepared before in {target}")
            return target
        try:
            with Ticker() as progress:
                api.prepare(name, target, source=place, progress=progress)
        except SlipstreamError as error:
            console.print(f"{title} is not available: {error}")
            continue
        console.print(f"{title}, prepared in {target}")
        return target
    raise SlipstreamError(f"no data could be prepared in {out}; see the reasons above")
