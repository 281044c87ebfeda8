"""Curves of the serving benchmark: p99 against the offered rate, and against the length."""

from collections import Counter
from pathlib import Path
from typing import Any

from slipstream.files import atomic_file

Row = dict[str, Any]


def draw(rows: list[Row], path: Path, slo: float) -> None:
    """Write a PNG: runs as dots (LoadGen's as crosses), a line through the best of our own."""
    from matplotlib.figure import Figure

    length, rate, ceiling = rows[0]["length"], fixed_rate(rows), 4e3 * slo
    panels = (
        (
            "rate",
            f"requests a second, {length} behaviours",
            [row for row in rows if row["length"] == length],
        ),
        (
            "length",
            f"behaviours, {rate:.1f} requests a second",
            [row for row in rows if row["rate"] == rate],
        ),
    )
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axis, (over, label, shown) in zip(figure.subplots(1, 2), panels, strict=True):
        for variant in dict.fromkeys(row["variant"] for row in shown):
            runs = [
                (row[over], min(row["p99_ms"], ceiling), row["load"])
                for row in shown
                if row["variant"] == variant
            ]
            color = None
            for load, marker in (("own", "o"), ("LoadGen", "x")):
                points = [(at, p99) for at, p99, driver in runs if driver == load]
                if points:
                    (line,) = axis.plot(
                        *zip(*points, strict=True),
                        marker,
                        label=None if color else variant,
                        color=color,
                    )
                    color = line.get_color()
            best = best_of([(at, p99) for at, p99, driver in runs if driver == "own"])
            axis.plot([at for at, _ in best], [p99 for _, p99 in best], "-", color=color)
        axis.axhline(1e3 * slo, color="grey", linestyle="--", linewidth=1)
        axis.set(xlabel=label, ylabel="p99 of the ranking stage (ms)", ylim=(0, ceiling * 1.05))
        axis.legend(fontsize=8)
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)


def fixed_rate(rows: list[Row]) -> float:
    """Return the rate at which most lengths were tried."""
    tried = {(row["rate"], row["length"]) for row in rows}
    rate: float = Counter(rate for rate, _ in tried).most_common(1)[0][0]
    return rate


def best_of(runs: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the smallest value at each place, in order."""
    return sorted(
        (place, min(value for at, value in runs if at == place)) for place in {at for at, _ in runs}
    )
