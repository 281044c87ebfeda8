"""`slipstream trace` shows the figures of a trace and draws it."""

from slipstream.cli.app import run_command
from slipstream.pipeline.schedule import Lane
from slipstream.pipeline.trace import Interval, write_trace


def test_a_run_without_a_trace_is_one_sentence(tmp_path, capsys):
    assert run_command(["trace", str(tmp_path)]) == 1
    assert "has no trace.json; train with a schedule" in capsys.readouterr().err


def test_figures_are_printed_and_the_picture_is_drawn(tmp_path, capsys):
    intervals = [
        Interval(Lane.COMPUTE, "update", 0, 0, 0.0, 0.0, 1.0, True, None),
        Interval(Lane.TABLE, "retrieve", 1, 0, 1.0, 1.0, 1.5, True, None),
        Interval(Lane.COMPUTE, "update", 1, 0, 1.5, 1.5, 2.0, True, None),
    ]
    write_trace(tmp_path / "trace.json", intervals, {"run": "tiny", "schedule": "nested"})
    assert run_command(["trace", str(tmp_path), "--steps", "1"]) == 0
    shown = capsys.readouterr().out
    assert "tiny, schedule nested" in shown and "exposed_lookup" in shown
    assert (tmp_path / "trace.png").stat().st_size > 0
