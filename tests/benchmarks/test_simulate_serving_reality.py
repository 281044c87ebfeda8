"""Recorded serving rates against simulated ones: calibration, replayed load, the search."""

import json
import time
from collections import Counter

import numpy as np
import pytest

from benchmarks.serving.runs import Sizes
from benchmarks.serving.search import LOWEST_RATE, Question
from benchmarks.serving.server import VARIANTS
from benchmarks.serving.trace import poisson_times
from benchmarks.serving.users import Population
from benchmarks.simulate import bench, serving_reality
from slipstream.simulate.shared_cores import CallCosts
from slipstream.simulate.simulated_engine import EngineSpec
from slipstream.simulate.traffic import draw_arrivals

CALL, TOKEN, PAIR, CACHED = 1e-3, 2e-6, 1.5e-9, 3e-7
CLIENT, ROUTER, LOOP = 3e-4, 4e-4, 5e-4
GROUPS = {"N 512": {"rates": {"relay": 40.0, "W1": 20.0}, "returning": 0.0}}


def pass_seconds(behaviours: int, idle: float = 0.0) -> float:
    tokens = 2 * behaviours + 100
    return CALL + idle + TOKEN * tokens + PAIR * tokens**2 / 2


def recorded_runs() -> list[dict]:
    """Return what a benchmark would record of a machine with these costs."""
    runs = []
    for variant in ("W1", "relay"):
        for trace, length in (("S", 384), ("S", 1024), ("N", 512)):
            about = {"variant": variant, "trace": trace, "length": str(length)}
            seconds = pass_seconds(length) + CLIENT + ROUTER + LOOP
            samples = {"rank_s": [0.9 * seconds, seconds, 1.1 * seconds], "hit_s": [2e-3] * 3}
            runs.append(about | {"kind": "service", "samples": samples})
            probe = about | {"kind": "probe", "rate": 100.0, "requests": 300, "number": 1}
            probe |= {"p50_ms": 8.0}
            spent = 300 / (2 * serving_reality.probe_seconds(probe))
            probe["generator_share"] = CLIENT * spent
            probe["router_share"] = ROUTER * spent
            probe["instances_share"] = (LOOP + pass_seconds(length)) * spent
            probe["samples"] = {"counters": {"busy_seconds": 300 * pass_seconds(length)}}
            runs.append(probe)
    return runs


def hit_rows() -> list[dict]:
    rows = []
    for behaviours in (16, 512, 1024, 2048):
        idle = {"behaviours": behaviours, "ms": 1e3 * pass_seconds(behaviours, idle=5e-4)}
        rows.append({"variant": "engine in line"} | idle)
        hit = CALL + (CACHED + 108 * PAIR) * 2 * behaviours
        rows.append({"variant": "engine hit", "behaviours": behaviours, "ms": 1e3 * hit})
    return rows


def test_the_calibration_finds_what_a_machine_takes():
    found = serving_reality.calibrate(recorded_runs(), hit_rows(), 2)
    assert found.spec.coefficients == pytest.approx((CALL, TOKEN, PAIR, CACHED), rel=1e-6)
    calls = found.calls
    assert calls.cores == 2 and 0.05 < found.spec.jitter < 0.15
    assert calls.client_seconds == pytest.approx(CLIENT)
    assert calls.router_seconds == pytest.approx(ROUTER)
    assert calls.instance_seconds == pytest.approx(LOOP)


def test_a_verdict_replays_the_queries_of_loadgen():
    times = serving_reality.loadgen_times(100.0, 4, 2)  # as LoadGen 5.1 sent them
    assert times == pytest.approx([0.0, 0.00204668, 0.02886186, 0.05837531], abs=1e-7)
    assert serving_reality.loadgen_times(200.0, 4, 2) == pytest.approx(times / 2)


def test_loadgen_itself_sends_them_then(tmp_path):
    lg = pytest.importorskip("mlperf_loadgen")
    sent = []

    def issue(samples):
        for sample in samples:
            sent.append(time.perf_counter())
            lg.QuerySamplesComplete([lg.QuerySampleResponse(sample.id, 0, 0)])

    settings, log = lg.TestSettings(), lg.LogSettings()
    settings.scenario, settings.mode = lg.TestScenario.Server, lg.TestMode.PerformanceOnly
    settings.server_target_qps, settings.server_target_latency_ns = 200, int(5e8)
    settings.min_duration_ms, settings.schedule_rng_seed = 0, 3
    settings.min_query_count = settings.max_query_count = 100
    log.log_output.outdir, log.log_output.copy_summary_to_stdout = str(tmp_path), False
    log.enable_trace = False
    sut = lg.ConstructSUT(issue, lambda: None)
    library = lg.ConstructQSL(1, 1, lambda _: None, lambda _: None)
    lg.StartTestWithLogSettings(sut, library, settings, log)
    lg.DestroyQSL(library)
    lg.DestroySUT(sut)
    late = np.array(sent) - sent[0] - serving_reality.loadgen_times(200.0, 100, 3)
    assert len(sent) == 100 and np.median(np.abs(late)) < 0.01


def test_a_run_replays_arrivals_and_stages_of_the_recorded_one_of_its_number():
    question = Question(Population("512", 1, 1, 512), "N")
    for kind, times in (("probe", poisson_times), ("verdict", serving_reality.loadgen_times)):
        plan = question.plan(VARIANTS["W1"], 50.0, 2, kind)
        drawn = draw_arrivals(serving_reality._traffic(plan, 30, 0.0), 0)
        found = serving_reality.replayed(plan, 30, drawn)
        assert found.at_R.tolist() == times(50.0, 30, 2).tolist()
        assert len(found.before_R) == 30 and 0.05 < found.before_R.mean() < 0.2
        assert found.user_R is drawn.user_R


def test_verdicts_allow_three_misses_of_1010_and_probes_of_300(monkeypatch):
    spec = EngineSpec(coefficients=(1e-3, 0.0, 0.0, 0.0), jitter=0.0)
    found = serving_reality.Calibration(CallCosts(cores=2), spec)
    runner = serving_reality.SimulatedRunner([], found, 0.0, Sizes(), 0)
    question = Question(Population("512", 1, 1, 512), "N")
    told = Counter()

    class Report:
        def __init__(self, within_slo):
            self.within_slo = within_slo

    for misses in (0, 3, 4):
        for kind, count in (("probe", 300), ("verdict", 1010)):
            within = 1 - misses / count
            monkeypatch.setattr(
                serving_reality, "simulate_serving", lambda within=within, **_: Report(within)
            )
            row = runner.run(question.plan(VARIANTS["W1"], 10.0, 1, kind))
            told[kind] += row["holds"] if kind == "probe" else row["verdict"] == "VALID"
    assert told == {"probe": 2, "verdict": 2}


def test_recorded_rates_are_compared_with_simulated_ones(tmp_path, monkeypatch):
    samples = {
        "runs": recorded_runs(),
        "figures": {"groups": GROUPS, "hit": {"rows": hit_rows()}},
    }
    content = {"rows": [{"samples": samples}], "machine": {"cores": 2}}
    (tmp_path / "serving.json").write_text(json.dumps(content))
    monkeypatch.setattr("benchmarks.evidence.RESULTS", tmp_path)
    monkeypatch.setattr(bench, "RESULT", tmp_path / "serving.json")
    found = bench.run(True, None, "rates")
    rows = found["rows"]
    assert [row["variant"] for row in rows] == ["N 512: relay", "N 512: W1"]
    assert found["claims"]["reality_error_slo"] == max(abs(row["error"]) for row in rows)
    assert found["claims"]["reality_rates"] == 2 > found["claims"]["reality_rates_within_20"]
    # Two cores, 4.2 ms a request: more than 476 a second cannot be, and short bursts pass.
    most = 2 / (pass_seconds(512) + CLIENT + ROUTER + LOOP - CALL)
    assert all(LOWEST_RATE < row["simulated"] < 2 * most for row in rows)
    assert not any(row["calibrates"] for row in rows)
