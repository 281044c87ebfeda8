"""Pictures of simulations: scaling of training, latency of serving. Touch this to draw another.

The timeline of a step is drawn by `pipeline/timeline.py`, like that of a real run.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.files import atomic_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from slipstream.simulate.training_simulation import TrainingReport


def draw_scaling(path: Path, reports: "Sequence[TrainingReport]") -> None:
    """Draw step time and efficiency over the number of workers, a line per schedule."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    times, shares = figure.subplots(1, 2)
    for name in dict.fromkeys(report.schedule for report in reports):
        line = [report for report in reports if report.schedule == name]
        workers = [report.workers for report in line]
        times.plot(workers, [1e3 * r.step_seconds for r in line], marker="o", label=name)
        shares.plot(workers, [100 * (r.efficiency or 1.0) for r in line], marker="o", label=name)
    times.set_ylabel("milliseconds a step")
    shares.set_ylabel("efficiency in percent")
    for axes in (times, shares):
        axes.set_xlabel("workers")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    shares.legend()
    save_figure(figure, path)


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a figure as PNG, whole or not at all."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    with atomic_file(path) as temporary:
        Path(temporary).write_bytes(picture.getvalue())
