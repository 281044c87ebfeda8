"""The trace of what ran when, and the shares of a step that nothing hid."""

import json
import time
from dataclasses import replace

import pytest

from slipstream.pipeline.schedule import Lane
from slipstream.pipeline.trace import (
    Interval,
    Trace,
    processor_seconds,
    read_trace,
    shares,
    write_trace,
)
from tests.support.pipeline_problem import Problem, start_pipeline

PROBLEM = Problem(steps=30, samples=4)


def interval(lane, stage, step, asked, begin, end, cause=None, caller=False):
    return Interval(lane, stage, step, 0, asked, begin, end, caller, cause)


def test_a_wait_is_charged_to_what_it_waits_for(tmp_path):
    trace = [
        interval(Lane.COMPUTE, "update", 0, 0.0, 0.9, 1.0, None, True),
        interval(Lane.TABLE, "retrieve", 1, 0.0, 0.5, 1.3),
        interval(Lane.ROWS, "answer", 1, 0.0, 1.3, 1.5, ("retrieve", 1, 0)),
        interval(Lane.COMPUTE, "compute", 1, 1.0, 1.5, 1.9, ("answer", 1, 0), True),
        interval(Lane.COMPUTE, "update", 1, 1.9, 1.9, 2.0, None, True),
    ]
    found = shares(trace)
    assert found["exposed_lookup"] == pytest.approx(0.3) and found["exposed_comm"] == pytest.approx(
        0.2
    )
    assert found["compute_utilisation"] == pytest.approx(0.5) and found[
        "step_seconds"
    ] == pytest.approx(1.0)
    assert found["busy_table"] == pytest.approx(0.3)
    write_trace(tmp_path / "trace.json", trace, {"run": "x"})
    again, about = read_trace(tmp_path / "trace.json")
    assert about == {"run": "x"} and shares(again) == pytest.approx(found)


def test_everything_a_serial_schedule_does_besides_computing_is_exposed():
    trace = [
        interval(Lane.COMPUTE, "update", 0, 0.0, 0.0, 1.0, None, True),
        interval(Lane.TABLE, "retrieve", 1, 1.0, 1.0, 1.5, None, True),
        interval(Lane.COMPUTE, "update", 1, 1.5, 1.5, 2.0, None, True),
    ]
    assert shares(trace)["exposed_lookup"] == pytest.approx(0.5)


def test_processor_time_counts_for_the_step_it_was_spent_on(tmp_path):
    trace = [
        replace(interval(Lane.TABLE, "retrieve", step, 0.0, 0.0, 1.0), cpu=0.1 * step, micro=micro)
        for step in range(5)
        for micro in range(2)
    ]
    assert processor_seconds(trace, 1, 3) == pytest.approx({"retrieve": 0.5})
    assert processor_seconds(trace, 3) == pytest.approx({"retrieve": 0.8})
    write_trace(tmp_path / "trace.json", trace, {})
    assert processor_seconds(read_trace(tmp_path / "trace.json")[0], 1, 3) == pytest.approx(
        {"retrieve": 0.5}
    )
    content = json.loads((tmp_path / "trace.json").read_text())
    for event in content["traceEvents"]:
        event["args"].pop("cpu_us", None)  # as traces were written before
    (tmp_path / "trace.json").write_text(json.dumps(content))
    assert processor_seconds(read_trace(tmp_path / "trace.json")[0], 1, 3) == {"retrieve": 0.0}


def test_a_lane_that_waits_spends_no_processor_time():
    trace = Trace()
    work, _, pipeline = start_pipeline("nested", PROBLEM, trace=trace)
    cut = work.cut

    def slowly(*arguments):
        time.sleep(0.02)
        return cut(*arguments)

    work.cut = slowly
    with pipeline:
        for _ in pipeline.steps():
            pass
    loads = [each for each in trace.intervals() if each.stage == "load"]
    assert all(each.cpu >= 0.0 for each in trace.intervals())
    assert sum(each.cpu for each in loads) < 0.5 * sum(each.end - each.begin for each in loads)
    assert any(each.cpu > 0.0 for each in trace.intervals() if each.stage == "compute")


def test_a_trace_remembers_only_the_newest_steps():
    trace = Trace(limit=5)
    with start_pipeline("nested", PROBLEM, trace=trace)[2] as pipeline:
        for _ in pipeline.steps():
            pass
    assert {interval.step for interval in trace.intervals()} <= set(range(18, 31))
