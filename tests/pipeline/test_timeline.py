"""The picture of a trace."""

from slipstream.pipeline.schedule import Lane
from slipstream.pipeline.timeline import draw_timeline
from slipstream.pipeline.trace import Interval

PNG = b"\x89PNG"


def test_a_trace_is_drawn_into_a_png(tmp_path):
    intervals = [
        Interval(lane, stage, step, 0, begin + step, begin + step, begin + step + 0.4, True)
        for step in range(6)
        for lane, stage, begin in ((Lane.TABLE, "retrieve", 0.0), (Lane.COMPUTE, "update", 0.5))
    ]
    draw_timeline(tmp_path / "trace.png", intervals, "a run")
    assert (tmp_path / "trace.png").read_bytes()[:4] == PNG


def test_a_trace_without_steps_is_drawn_too(tmp_path):
    draw_timeline(tmp_path / "empty.png", [], "nothing ran")
    assert (tmp_path / "empty.png").read_bytes()[:4] == PNG
