"""Draws a trace: one row per lane, time to the right, a colour per stage, a shade per step.

Touch this to change the picture of `slipstream trace`.
"""

import io
from pathlib import Path

from slipstream.files import atomic_file
from slipstream.pipeline.schedule import Lane
from slipstream.pipeline.trace import Interval

_STEPS_SHOWN = 4


def draw_timeline(
    path: Path, intervals: list[Interval], title: str, steps: int = _STEPS_SHOWN
) -> None:
    """Draw the last whole steps of a trace into a PNG."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ends = {each.step: each.end for each in intervals if each.stage == "update"}
    last = max(ends, default=0)
    first = max(min(ends, default=0), last - steps)
    begin, end = (ends.get(first, 0.0), ends.get(last, 1.0)) if last > first else (0.0, 1.0)
    lanes = [lane for lane in Lane if any(each.lane == lane for each in intervals)]
    stages = list(
        dict.fromkeys(each.stage for each in sorted(intervals, key=lambda each: each.begin))
    )
    colour = {stage: colormaps["tab20"](place % 20) for place, stage in enumerate(stages)}
    figure = Figure(figsize=(14, 0.6 * len(lanes) + 1.6), layout="constrained")
    axes = figure.subplots()
    for each in intervals:
        if each.end < begin or each.begin > end:
            continue
        left, right = max(each.begin, begin), min(each.end, end)
        box = [((left - begin) * 1e3, (right - left) * 1e3)]
        row = len(lanes) - 1 - lanes.index(each.lane)
        shade = 1.0 if each.step % 2 else 0.6
        axes.broken_barh(
            box,
            (row - 0.4, 0.8),
            facecolors=colour[each.stage],
            alpha=shade,
            edgecolor="white",
            linewidth=0.3,
        )
    axes.set_yticks(range(len(lanes)), [str(lane) for lane in reversed(lanes)])
    axes.set_xlim(0, (end - begin) * 1e3)
    axes.set_xlabel("milliseconds")
    axes.set_title(title)
    axes.legend(
        handles=[Patch(color=colour[stage], label=stage) for stage in stages],
        ncols=11,
        loc="upper center",
        fontsize=7,
    )
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    with atomic_file(path) as temporary:
        temporary.write_bytes(picture.getvalue())
