"""The arena's result: its tables at 80 columns, its JSON, and the picture of quality over time.

Touch this when a result is shown in another way.
"""

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.arena.data_sets import DATA_SETS
from benchmarks.arena.summary import Claims, Row
from slipstream.bench import harness
from slipstream.errors import SlipstreamError
from slipstream.files import atomic_file

RECORDED = Path(__file__).parents[1] / "results" / "arena.json"
WIDTH = 80
Result = dict[str, Any]
# What peers publish for all their epochs: HR@10, NDCG@10 and where it stands; not measured here.
PUBLISHED = {
    ("ml-1m", "rectools-hstu"): (0.3226, 0.1880, "RecTools' HSTU tutorial, 100 epochs, one seed"),
    ("ml-1m", "rectools-hstu-large"): (
        0.3642,
        0.2164,
        "RecTools' HSTU tutorial, 100 epochs, one seed",
    ),
}
HEADINGS = ("", "HR@10", "NDCG", "epoch", "train", "to q.", "1 ep.", "GB", "p50", "p99")
LEGEND = (
    "epoch: the best one of those reached. train: to the best epoch. to q.: until the first "
    "peer's quality. 1 ep.: an epoch. p50, p99: one recommendation, ms. * knows the time of the "
    "request."
)


def origin(threads: int, minutes: float) -> dict[str, Any]:
    """Return of which command, commit and machine figures are."""
    return {
        "command": harness.command_line(),
        "commit": harness.commit(),
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": harness.machine(),
        "threads": threads,
        "minutes": minutes,
    }


def make_result(rows: Sequence[Row], claims: Claims, threads: int, minutes: float) -> Result:
    """Return the JSON of a contest; every row has an origin of its own, too."""
    found = origin(threads, minutes)
    return {"bench": "arena", **found, "rows": list(rows), "claims": claims}


def write_result(result: Result, path: Path) -> None:
    """Write a result, whole or not at all."""
    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def read_recorded(path: Path = RECORDED) -> Result:
    """Return the recorded result."""
    if not path.is_file():
        raise SlipstreamError(
            f"no contest is recorded; run 'python -m benchmarks.arena --json "
            f"benchmarks/results/{path.name}' on a quiet machine"
        )
    result: Result = json.loads(path.read_text(encoding="utf-8"))
    return result


def show(result: Result, console: Console) -> None:
    """Print a table for every data set, then what failed and the claims."""
    for name in dict.fromkeys(row["data"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["data"] == name]
        about = DATA_SETS[name].about if name in DATA_SETS else name
        console.print(f"\n[bold]{about}[/bold]", highlight=False)
        console.print(_table(rows), highlight=False)
        for row in rows:
            for line in _notes(row):
                console.print(line, highlight=False, markup=False)
    machine = result["machine"]
    console.print(f"\n{LEGEND}", style="dim", highlight=False)
    console.print(
        f"{machine['processor']}, {result['threads']} threads, at most {result['minutes']:g} "
        f"minutes of training a run, {result['when'][:10]}",
        style="dim",
        highlight=False,
    )
    for name, value in result["claims"].items():
        console.print(f"{name} = {value:.4g}", highlight=False)


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for place, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if place else "left", no_wrap=True)
    for row in rows:
        name = row["variant"] + "*" * bool(row["request_time"])
        style = "bold" if row["own"] else None
        if not row["samples"]:
            table.add_row(name, "failed", style=style)
            continue
        epochs = f"{row['best_epoch']:.0f}/{row['epochs']:.0f}"
        times = ("seconds_to_best", "seconds_to_quality", "seconds_per_epoch")
        table.add_row(
            name,
            *(_fraction(row[figure]) for figure in ("HR@10", "NDCG@10")),
            epochs,
            *(short_time(row[figure]) for figure in times),
            f"{row['peak_bytes'] / 1e9:.2f}",
            *(_milliseconds(row[f"recommend_ms_{which}"]) for which in ("p50", "p99")),
            style=style,
        )
    return table


def _notes(row: Row) -> list[str]:
    """Return what a table has no column for: failures, spread, published figures, cuts."""
    name, samples = row["variant"], row["samples"]
    if row["failure"]:
        return [f"{name}: {row['failure']}"]
    notes = []
    if len(samples) > 1:
        notes.append(
            f"{name}: {len(samples)} seeds, deviation of HR@10 {row['sd HR@10']:.4f}, of NDCG@10 "
            f"{row['sd NDCG@10']:.4f}"
        )
    if (row["data"], name) in PUBLISHED:
        hit_rate, ndcg, source = PUBLISHED[row["data"], name]
        notes.append(
            f"{name}: published {_fraction(hit_rate)} and {_fraction(ndcg)} ({source}); not "
            "measured here"
        )
    if any(sample.get("cut_short") for sample in samples):
        notes.append(f"{name}: its last epoch was cut short after two budgets")
    p50, p99 = (row[f"compiled recommend_ms_{which}"] for which in ("p50", "p99"))
    if p50 is not None:
        notes.append(
            f"{name}: compiled by OpenVINO p50 {_milliseconds(p50)}, p99 {_milliseconds(p99)}"
        )
    return notes


def _fraction(value: float) -> str:
    return f"{value:.4f}".removeprefix("0")


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def short_time(seconds: float | None) -> str:
    """Return a time in at most six characters."""
    if seconds is None:
        return "-"
    if seconds < 100:
        return f"{seconds:.1f}s"
    return f"{seconds:.0f}s" if seconds < 1000 else f"{seconds / 60:.1f}m"


def draw(result: Result, path: Path) -> None:
    """Draw validation NDCG@10 over training time, a panel for every data set."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [
        name
        for name in dict.fromkeys(row["data"] for row in result["rows"])
        if any(row["samples"] for row in result["rows"] if row["data"] == name)
    ]
    if not names:
        raise SlipstreamError("no contender has figures, so there is nothing to draw")
    figure, panels = pyplot.subplots(
        len(names), 1, figsize=(8, 4 * len(names)), squeeze=False, layout="constrained"
    )
    shown = dict.fromkeys(row["variant"] for row in result["rows"] if row["samples"])
    colours = {variant: f"C{number}" for number, variant in enumerate(shown)}
    for panel, name in zip(panels[:, 0], names, strict=True):
        for row in (row for row in result["rows"] if row["data"] == name and row["samples"]):
            curve = row["samples"][0]["curve"]
            panel.plot(
                [line["training_seconds"] for line in curve],
                [line["validation"]["NDCG@10"] for line in curve],
                label=row["variant"],
                color=colours[row["variant"]],
                linewidth=2.0 if row["own"] else 1.2,
                linestyle="-" if row["own"] else "--",
                marker=".",
            )
        panel.set(xscale="log", xlabel="training, s", ylabel="validation NDCG@10", title=name)
        panel.legend(fontsize="small")
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
    pyplot.close(figure)
