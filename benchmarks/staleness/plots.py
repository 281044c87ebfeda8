"""The study's pictures: differences seed by seed, and the cost of staleness by collision rate."""

from pathlib import Path
from typing import Any

from benchmarks.staleness.variants import BASELINE, BY_NAME
from slipstream.files import atomic_file

EXACT, STALE, AVERAGED = "#2a6f97", "#c1121f", "#e09f3e"


def draw_differences(summary: dict[str, Any], target: Path) -> Path:
    """Draw a panel per case: every seed's difference, their mean and its 95 % interval."""
    from matplotlib.figure import Figure

    cases = [case for case in summary["cases"] if any(row["difference"] for row in case["rows"])]
    columns = min(3, max(1, len(cases)))
    figure = Figure(
        figsize=(5.2 * columns, 3.6 * -(-max(1, len(cases)) // columns)), layout="constrained"
    )
    panels = figure.subplots(-(-max(1, len(cases)) // columns), columns, squeeze=False).flatten()
    for axes in panels[len(cases) :]:
        axes.set_axis_off()
    for axes, case in zip(panels, cases, strict=False):
        name = case["figures"][0]
        base = next(row for row in case["rows"] if row["variant"] == BASELINE)
        rows = [row for row in case["rows"] if name in row["difference"]]
        for place, row in enumerate(rows):
            found = row["difference"][name]
            values = [_of(row, name, seed) - _of(base, name, seed) for seed in found["seeds"]]
            axes.plot(values, [place] * len(values), ".", color="grey", markersize=4)
            half = found["high"] - found["mean"]
            axes.errorbar(
                found["mean"],
                place,
                xerr=half,
                fmt="o",
                capsize=3,
                color=_colour(row["variant"]),
                markersize=5,
            )
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set_yticks(range(len(rows)), [row["variant"] for row in rows], fontsize=8)
        axes.invert_yaxis()
        axes.set(title=case["case"], xlabel=f"difference of {name} to synchronous")
        axes.locator_params(axis="x", nbins=5)
        axes.grid(axis="x", alpha=0.2)
    return _save(figure, target)


def draw_collisions(summary: dict[str, Any], target: Path) -> Path:
    """Draw the relative change of the main figure against the share of updated rows."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for case in summary["cases"]:
        name, points = case["figures"][0], []
        means = {row["variant"]: row["mean"].get(name) for row in case["rows"]}
        for row in case["rows"]:
            staleness = BY_NAME[row["variant"]].staleness
            if (
                name in row["difference"]
                and staleness
                and "late" not in row["variant"]
                and means.get(BASELINE)
            ):
                scale, found = 100 / means[BASELINE], row["difference"][name]
                share = case["collisions"]["item"]["keys"].get(str(staleness))
                if share is not None:
                    points.append(
                        (
                            100 * share,
                            scale * found["mean"],
                            scale * (found["high"] - found["mean"]),
                        )
                    )
        if points:
            x, y, half = zip(*sorted(points), strict=True)
            axes.errorbar(x, y, yerr=half, marker="o", capsize=3, label=f"{case['case']} ({name})")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set(
        xlabel="rows of a step that one of the last τ steps updated (%), τ = 1, 2, 4",
        ylabel="change of the main figure (%)",
    )
    if axes.containers:
        axes.legend(fontsize=8, frameon=False)
    axes.grid(alpha=0.2)
    return _save(figure, target)


def _of(row: dict[str, Any], figure: str, seed: int) -> float:
    return float(row["samples"][figure][row["seeds"].index(seed)])


def _colour(variant: str) -> str:
    if BY_NAME[variant].exact:
        return EXACT
    return STALE if BY_NAME[variant].staleness else AVERAGED


def _save(figure: Any, target: Path) -> Path:
    with atomic_file(target) as path:
        figure.savefig(path, format="png", dpi=120)
    return target
