"""The serving benchmark's curves: p99 against the offered rate, and against the length of the history."""

from pathlib import Path
from typing import Any

from slipstream.files import atomic_file


def draw(rows: list[dict[str, Any]], path: Path, slo: float) -> None:
    """Writes a PNG; misses above the picture's edge are drawn at it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots(1, 2)
    lengths = sorted({row["length"] for row in rows})
    usual = max(lengths, key=lambda length: sum(row["length"] == length for row in rows))
    ceiling = 4e3 * slo
    for variant in dict.fromkeys(row["variant"] for row in rows):
        mine = [row for row in rows if row["variant"] == variant]
        panels = (("rate", [row for row in mine if row["length"] == usual]), ("length", mine))
        for axis, (name, chosen) in zip(axes, panels, strict=True):
            if name == "length" and variant not in ("relay", "without"):
                continue
            points = sorted((row[name], min(row["p99_ms"], ceiling)) for row in chosen)
            axis.plot([x for x, _ in points], [y for _, y in points], marker="o", label=variant)
    for axis, label in zip(axes, ("requests a second", "behaviours of a history"), strict=True):
        axis.axhline(1e3 * slo, color="grey", linestyle="--", linewidth=1)
        axis.set(xlabel=label, ylabel="p99 of the ranking stage (ms)", ylim=(0, ceiling * 1.05))
        axis.legend(fontsize=8)
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
