"""`report.html`: one self-contained page per run, with its curves, its figures and its recipe.

Touch this to show more of a run.
"""

import base64
import html
import io
from pathlib import Path
from typing import Any

from slipstream.files import atomic_file, read_json
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
pre { background: #f4f6f9; padding: 1rem; overflow-x: auto }
"""
CURVES = {
    "Loss": ("loss",),
    "Validation": ("HR@10", "NDCG@10", "AUC"),
    "Speed (tokens per second)": ("tokens_per_second",),
    "Model FLOPs utilisation": ("mfu",),
    "Learning rate": ("lr",),
}


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


def _figure(row: dict[str, Any], name: str) -> float | None:
    """Return a figure of a logged step or of a logged evaluation."""
    return row.get(name, row.get("validation", {}).get(name))


def _table(values: dict[str, Any]) -> str:
    def show(value: Any) -> str:
        return f"{value:.4f}" if isinstance(value, float) else html.escape(str(value))

    rows = "".join(
        f"<tr><td>{html.escape(str(name))}</td><td>{show(value)}</td></tr>"
        for name, value in values.items()
    )
    return f"<table>{rows}</table>"


def write_report(run_directory: Path) -> Path:
    """Draw `report.html` of a run from its run.json, metrics.jsonl and recipe.yaml."""
    run = read_json(run_directory / "run.json")
    rows = read_metrics(run_directory / "metrics.jsonl")
    parts = [f"<h1>{html.escape(str(run.get('name', run_directory.name)))}</h1>"]
    parts.append(
        _table({name: value for name, value in run.items() if not isinstance(value, dict | list)})
    )
    for which in ("test", "validation"):
        if run.get(which):
            parts.append(f"<h2>{which.capitalize()} metrics</h2>{_table(run[which])}")
    for title, names in CURVES.items():
        found = {
            name: [
                (row["step"], value) for row in rows if (value := _figure(row, name)) is not None
            ]
            for name in names
        }
        series = {name: points for name, points in found.items() if points}
        if series:
            parts.append(_curve(title, series))
    recipe = run_directory / "recipe.yaml"
    if recipe.exists():
        parts.append(f"<h2>Recipe</h2><pre>{html.escape(recipe.read_text(encoding='utf-8'))}</pre>")
    title = html.escape(f"Slipstream run {run_directory.name}")
    head = (
        '<!doctype html><html lang="en"><meta '
        f'charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    )
    page = f"{head}{''.join(parts)}</html>\n"
    target = run_directory / "report.html"
    with atomic_file(target) as path:
        path.write_text(page, encoding="utf-8")
    return target
