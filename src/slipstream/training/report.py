"""`report.html`: one self-contained page per run: figures, slices, samples, curves, recipe.

It is drawn from what the run's files hold; what is not there is left out. Touch this to show more
of a run.
"""

import base64
import html
import io
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from slipstream.files import atomic_file, read_json
from slipstream.training.popularity import BASELINE
from slipstream.training.telemetry import read_metrics

STYLE = """
body {
  font: 16px/1.5 system-ui, sans-serif; color: #1c2733;
  max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
}
h1 { font-weight: 600 }
h2 { font-weight: 600; margin-top: 2.2rem }
table { border-collapse: collapse }
td, th {
  padding: .25rem .9rem .25rem 0; text-align: left;
  border-bottom: 1px solid #dde3ea; font-variant-numeric: tabular-nums;
}
img { max-width: 100%; margin: .5rem 0 }
small { color: #5a6b7d }
pre { background: #f4f6f9; padding: 1rem; overflow-x: auto }
"""
COUNTS = ("users", "behaviours")
SHARES = ("repeats", "cold_users", "cold_items")
CURVES = {
    "Loss": ("loss",),
    "Validation": ("HR@10", "NDCG@10", "AUC"),
    "Speed (tokens per second)": ("tokens_per_second",),
    "Model FLOPs utilisation": ("mfu",),
    "Learning rate": ("lr",),
    "Exposed share of a step (lookup, exchange)": ("exposed_lookup", "exposed_comm"),
}
COMPARED = {  # of several runs, a line for each
    "Loss": "loss",
    "Validation HR@10": "HR@10",
    "Validation NDCG@10": "NDCG@10",
    "Validation AUC": "AUC",
    "Learning rate": "lr",
    "Speed (tokens per second)": "tokens_per_second",
}
FIRST = ("HR@10", "NDCG@10", "AUC")  # figures of a run that its line shows
MOST_RUNS = 20  # whose curves one picture shows


def _curve(title: str, series: dict[str, list[tuple[float, float]]]) -> str:
    from matplotlib.figure import Figure  # imported here: most commands never draw

    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.subplots()
    for label, points in series.items():
        axes.plot(*zip(*points, strict=True), label=label, marker="." if len(points) < 40 else "")
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    if len(series) > 1:
        axes.legend()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    picture = base64.b64encode(buffer.getvalue()).decode()
    return (
        f'<h2>{html.escape(title)}</h2><img alt="{html.escape(title)}" '
        f'src="data:image/png;base64,{picture}">'
    )


def _figure(row: dict[str, Any], name: str) -> Any:
    """Return a figure of a logged step or of a logged evaluation."""
    return row.get(name, row.get("validation", {}).get(name))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return an HTML table of texts; an empty head is left out."""

    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    first = line(head, "th") if head else ""
    return f"<table>{first}{''.join(line(row, 'td') for row in rows)}</table>"


def show_figure(name: str, value: float) -> str:
    """Return a figure for readers: counts whole, shares in percent, metrics to four places."""
    if name in COUNTS:
        return f"{value:,.0f}"
    return f"{value:.1%}" if name in SHARES else f"{value:.4f}"


def _is_known(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _summary(run: dict[str, Any]) -> str:
    """Return the paragraph on how the run went."""
    parts = [str(run["status"])] if run.get("status") else []
    parts += [f"{run[name]:,} {name}s" for name in ("step", "epoch") if _is_known(run.get(name))]
    if _is_known(run.get("best_step")):
        parts.append(f"best at step {run['best_step']:,}")
    if _is_known(run.get("seconds")):
        minutes, seconds = divmod(round(run["seconds"]), 60)
        parts.append(f"{minutes:,} min {seconds} s" if minutes else f"{seconds} s")
    if run.get("versions", {}).get("slipstream"):
        parts.append(f"Slipstream {run['versions']['slipstream']}")
    return f"<p>{html.escape(', '.join(parts))}</p>" if parts else ""


def _metrics(run: dict[str, Any], split: str) -> str:
    """Return the figures of a split: the model, beside it popularity and other protocols."""
    figures = run[split]
    columns: dict[str, dict[str, Any]] = {"model": figures}
    columns["popularity"] = {
        name.removeprefix(BASELINE): value
        for name, value in figures.items()
        if name.startswith(BASELINE)
    }
    columns |= {
        name.removeprefix(f"{split}_").replace("_", " "): value
        for name, value in run.items()
        if name.startswith(f"{split}_") and isinstance(value, dict)
    }
    columns = {name: column for name, column in columns.items() if column}
    names = [n for n in figures if n not in COUNTS + SHARES and not n.startswith(BASELINE)]
    rows = [
        [name, *(_cell(name, column.get(name)) for column in columns.values())] for name in names
    ]
    table = _table(["", *columns], (row for row in rows if any(row[1:])))
    about = [
        f"{name.replace('_', ' ')} {show_figure(name, figures[name])}"
        for name in COUNTS + SHARES
        if _is_known(figures.get(name))
    ]
    rules = run.get("recipe", {})
    about += [f"{rule}: {rules[rule]}" for rule in ("repeat", "window") if rule in rules]
    return f"<h2>{split.capitalize()} metrics</h2>{table}<p>{html.escape('; '.join(about))}</p>"


def _cell(name: str, value: Any) -> str:
    return show_figure(name, value) if _is_known(value) else ""


def _slices(rows: list[dict[str, Any]]) -> str:
    """Return a table of metrics per group of queries."""
    metrics = [name for name in rows[0] if name not in ("by", "from", "to", "users")]
    lines = [
        [
            str(row["by"]),
            f"{row['from']:,}" if row["from"] == row["to"] else f"{row['from']:,} to {row['to']:,}",
            f"{row['users']:,}",
            *(_cell(name, row[name]) for name in metrics),
        ]
        for row in rows
    ]
    note = "History length counts behaviours, popularity how often the target stands in training."
    return f"<h2>Slices</h2>{_table(['by', 'range', 'users', *metrics], lines)}<p>{note}</p>"


def _samples(samples: list[dict[str, Any]]) -> str:
    """Return what a few users would have been recommended just before the held-out item."""
    parts = ["<h2>Sample recommendations</h2>"]
    for sample in samples:
        hit = sample["hit"]
        recommended = [
            f"{item} ✓" if place == hit else item
            for place, item in enumerate(sample["recommended"], 1)
        ]
        rows = itertools.zip_longest(sample["history"], recommended, fillvalue="")
        outcome = f"recommended at place {hit}" if hit else f"not among the best {len(recommended)}"
        parts.append(
            f"<h3>User {html.escape(sample['user'])}</h3>"
            + _table(["latest history", "recommended"], rows)
            + f"<p>Then came {html.escape(sample['truth'])}: {outcome}.</p>"
        )
    return "".join(parts)


def _points(rows: list[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    """Return (step, value) of a figure, where it is known."""
    return [(row["step"], value) for row in rows if _is_known(value := _figure(row, name))]


def _curves(rows: list[dict[str, Any]]) -> Iterator[str]:
    for title, names in CURVES.items():
        found = {name: _points(rows, name) for name in names}
        series = {name: points for name, points in found.items() if points}
        if series:
            yield _curve(title, series)


def _small_print(run: dict[str, Any]) -> str:
    """Return digests, versions and machine, for those who compare runs."""
    store, told = run.get("store") or {}, []
    told += [f"data {store['directory']}"] if store.get("directory") else []
    told += [f"data digest {store['digest']}"] if store.get("digest") else []
    told += [f"recipe digest {run['trained_digest']}"] if run.get("trained_digest") else []
    for group in ("versions", "machine"):
        told += [f"{name} {value}" for name, value in (run.get(group) or {}).items()]
    return f"<p><small>{html.escape(', '.join(told))}</small></p>" if told else ""


def report_title(run: dict[str, Any], directory: Path) -> str:
    """Return the name of the run's directory, of its recipe where that differs, and of the data."""
    store = run.get("store") or {}
    data = store.get("name") or Path(store.get("directory") or "").name
    name, recipe = directory.resolve().name, str(run.get("name") or "")
    title = f"{name} ({recipe})" if recipe and recipe != name else name
    return f"{title} on {data}" if data else title


def write_report(run_directory: Path) -> Path:
    """Draw `report.html` of a run from its run.json, metrics.jsonl and recipe.yaml."""
    run = read_json(run_directory / "run.json")
    title = html.escape(report_title(run, run_directory))
    parts = [f"<h1>{title}</h1>", _summary(run)]
    for split in ("test", "validation"):
        if run.get(split):
            parts.append(_metrics(run, split))
        if run.get(f"{split}_slices"):
            parts.append(_slices(run[f"{split}_slices"]))
        if run.get(f"{split}_samples"):
            parts.append(_samples(run[f"{split}_samples"]))
    if run.get("metrics") and not run.get("validation"):
        parts.append(_metrics({**run, "validation": run["metrics"]}, "validation"))
    parts += _curves(read_metrics(run_directory / "metrics.jsonl"))
    recipe = run_directory / "recipe.yaml"
    if recipe.exists():
        parts.append(f"<h2>Recipe</h2><pre>{html.escape(recipe.read_text(encoding='utf-8'))}</pre>")
    parts.append(_small_print(run))
    return _write_page(run_directory / "report.html", title, parts)


def _write_page(target: Path, title: str, parts: Iterable[str]) -> Path:
    """Write a page, whole or not at all; its title is HTML already."""
    head = (
        '<!doctype html><html lang="en"><meta '
        f'charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    )
    with atomic_file(target) as path:
        path.write_text(f"{head}{''.join(parts)}</html>\n", encoding="utf-8")
    return target


def write_comparison(run_directories: Sequence[Path], target: Path) -> Path:
    """Draw the curves of several runs over each other, from what their files hold."""
    shown = list(run_directories)[:MOST_RUNS]
    notes = [read_json(directory / "run.json") for directory in shown]
    rows = {str(directory): read_metrics(directory / "metrics.jsonl") for directory in shown}
    names = _short_names(shown)
    title = html.escape(f"{len(run_directories)} runs side by side")
    left = len(run_directories) - len(shown)
    lines = [
        [name, str(note.get("status", "")), f"{note.get('step') or 0:,}"]
        + [_cell(metric, (note.get("metrics") or {}).get(metric)) for metric in FIRST]
        for name, note in zip(names, notes, strict=True)
    ]
    parts = [f"<h1>{title}</h1>", _table(["run", "status", "steps", *FIRST], lines)]
    parts += [f"<p>{left} more runs are not drawn.</p>"] if left else []
    for heading, figure in COMPARED.items():
        found = zip(names, (_points(each, figure) for each in rows.values()), strict=True)
        series = {name: points for name, points in found if points}
        if series:
            parts.append(_curve(heading, series))
    return _write_page(target, title, parts)


def _short_names(directories: Sequence[Path]) -> list[str]:
    """Return names of runs: the last part of their paths where that tells them apart."""
    names = [directory.resolve().name for directory in directories]
    return names if len(set(names)) == len(names) else [str(each) for each in directories]
