"""Whole simulated trainings: closed forms, monotony, balance, and the same seed twice."""

import pytest

from slipstream.errors import SlipstreamError
from slipstream.pipeline.schedule import SCHEDULES
from slipstream.pipeline.trace import read_trace, shares, write_trace
from slipstream.simulate import scale_training, simulate_training

PHASES = {"compute": 1000, "lookup": 800, "exchange": 400, "overhead": 10}
PAPER = {"name": "paper", "workers": 64, "phases": PHASES, "taper": 1.0}
WORK = {
    "workers": 16,
    "device": {"teraflops": 0.1, "call_us": 0},
    "workload": {
        "samples": 8,
        "items": 100_000,
        "lengths": {"median": 100, "sigma": 1.0},
        "model": {"dim": 64},
    },
}


def milliseconds(cluster, schedule, **settings):
    return 1e3 * simulate_training(cluster, schedule, **settings).step_seconds


def test_series_is_the_sum_and_each_schedule_hides_what_it_promises():
    assert milliseconds(PAPER, "serial") == pytest.approx(2200)
    assert milliseconds(PAPER, "dual_buffer") == pytest.approx(1000 + 400 + 10)
    # Rows of a step are written while the keys of the next one are routed.
    assert milliseconds(PAPER, "frozen_window") == pytest.approx(1000 + 700 + 400 / 8)
    assert milliseconds(PAPER, "nested") == pytest.approx(1000 + 400 / 8 + 10)
    assert milliseconds(PAPER | {"taper": 0.5}, "nested") == pytest.approx(1000 + 400 / 14 + 10)


def test_one_worker_equals_the_closed_form():
    report = simulate_training({"phases": {"compute": 50}}, "serial", workers=1)
    assert report.step_seconds == pytest.approx(0.05) == report.compute_seconds
    assert report.compute_utilisation == pytest.approx(1.0) and report.imbalance == 0.0


def test_a_lane_that_works_longer_than_compute_is_the_bound():
    slow = PAPER | {"phases": PHASES | {"lookup": 4000}}
    report = simulate_training(slow, "nested")
    # Half of a lookup is the work of the keys' lane; reads and write-backs share the rest.
    assert report.bound == "network" and report.step_seconds == pytest.approx(2.0, rel=0.02)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_faster_hardware_is_never_slower(name):
    slow = simulate_training(WORK, name, steps=4)
    for faster in (
        {"network": {"gb_per_s": 50, "latency_us": 3}},
        {"device": {"teraflops": 0.2, "call_us": 0}},
        {"host": {"row_ns": 10}},
    ):
        assert simulate_training(WORK | faster, name, steps=4).step_seconds <= slow.step_seconds


def test_the_same_seed_gives_the_same_result_and_another_one_does_not():
    first, again, other = (simulate_training(WORK, "nested", seed=s) for s in (1, 1, 2))
    assert first == again and first.intervals == again.intervals
    assert other.step_seconds != first.step_seconds


def test_unequal_batches_cost_time_and_balance_wins_it_back():
    uneven = WORK | {"workload": WORK["workload"] | {"balance": "none"}}
    without, balanced = (simulate_training(each, "nested") for each in (uneven, WORK))
    assert without.imbalance > 0.1 > balanced.imbalance
    assert without.step_seconds > balanced.step_seconds


def test_scaling_is_relative_to_the_first_number_of_workers():
    growing = PAPER | {"phases": PHASES | {"lookup": {"factor": 2.0}}}
    found = scale_training(growing, "serial", [64, 128, 256])
    assert found[0].efficiency == 1.0 > found[1].efficiency > found[2].efficiency
    assert found[1].efficiency == pytest.approx(found[0].step_seconds / found[1].step_seconds)


def test_the_timeline_is_a_trace_of_the_pipeline(tmp_path):
    report = simulate_training(PAPER, "nested")
    write_trace(tmp_path / "trace.json", report.intervals, {})
    again, _ = read_trace(tmp_path / "trace.json")
    told = shares(again, 5, 10)
    assert told["step_seconds"] == pytest.approx(report.step_seconds, rel=1e-6)
    assert told["exposed_comm"] == pytest.approx(report.exposed_comm, abs=1e-6)


def test_wrong_numbers_are_refused_in_a_sentence():
    with pytest.raises(SlipstreamError, match="multiple of the replicas"):
        simulate_training(PAPER, "nested", workers=10, replicas=4)
    with pytest.raises(SlipstreamError, match="at least one step"):
        simulate_training(PAPER, "nested", steps=0)
    with pytest.raises(SlipstreamError, match="unknown schedule"):
        simulate_training(PAPER, "nestd")
