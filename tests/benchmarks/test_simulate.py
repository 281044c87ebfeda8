"""The simulator's comparisons: calibrated on two rows only, complete, and honest about misses."""

import json
from typing import Any

import numpy as np
import pytest

from benchmarks.simulate import bench, nestpipe, papers, reality, turbogr
from benchmarks.simulate.calibration import Choices, calibrate, serial_step, steps_at_128
from slipstream.errors import SlipstreamError
from slipstream.pipeline.hazards import Task
from slipstream.pipeline.schedule import make_schedule
from slipstream.simulate.cluster import open_cluster


@pytest.fixture(scope="module")
def table():
    return nestpipe.predict_table()


def test_calibration_goes_through_the_rows_of_128_and_256_workers():
    laws = calibrate()
    whole = laws.steps_128["TorchRec"]
    assert serial_step(laws, 128) == pytest.approx(whole, rel=1e-6)
    efficiency = papers.NESTPIPE["TorchRec"].efficiency[256]
    assert serial_step(laws, 256) == pytest.approx(whole / efficiency, rel=1e-6)


def test_no_row_beyond_256_workers_calibrates(monkeypatch):
    before = calibrate()
    for row in papers.NESTPIPE.values():
        for workers in (512, 1024, 1536):
            monkeypatch.setitem(row.throughput, workers, 9.0)
            monkeypatch.setitem(row.efficiency, workers, 0.1)
    for name in ("LOOKUP_1536", "COMM_1536", "COMM_2D_1536", "COMPUTE_1536"):
        monkeypatch.setattr(papers, name, 1.0)
    assert calibrate() == before


def test_throughputs_lie_where_all_rounded_rows_allow():
    for system, step in steps_at_128().items():
        throughput = 128 * papers.SAMPLES / step / 100
        row = papers.NESTPIPE[system]
        assert abs(throughput - row.throughput[128]) <= 0.0051
        assert abs(2 * throughput * row.efficiency[256] - row.throughput[256]) <= 0.0051


def test_the_shipped_cluster_file_has_the_calibrated_laws():
    shipped, laws = open_cluster("nestpipe").phases, calibrate()
    wanted = laws.phases(residual=laws.residual_nested, between_at_end=True)
    for workers in (128, 1536):
        for name in ("compute", "lookup", "exchange", "between_groups", "overhead"):
            assert getattr(shipped, name).at(workers) == pytest.approx(
                getattr(wanted, name).at(workers), rel=1e-5
            )


def test_every_printed_row_is_compared_and_the_worst_is_the_claim(table):
    rows, claims = table
    own = [
        row
        for row in rows
        if row["part"] == "nestpipe" and row["laws"] == next(iter(nestpipe.VARIED))
    ]
    assert len(own) == 4 * 4 + 1
    held = [abs(row["points"]) for row in own if row["workers"] >= 512]
    assert claims["worst_error_points"] == max(held)
    assert claims["rows_beyond_5_points"] == sum(points > 5 for points in held)


def test_at_1536_workers_every_efficiency_is_within_5_points_and_the_speedup_within_a_tenth(table):
    _, claims = table
    assert claims["worst_error_points_1536"] < 5
    assert abs(claims["nestpipe_speedup_error"]) < 0.1


def test_a_wrong_law_is_seen(table):
    rows, _ = table
    varied = {row["variant"]: row for row in rows if row["part"] == "varied"}
    assert varied["lookup as log n"]["worst_points"] > 15
    assert Choices() != nestpipe.VARIED["lookup as log n"]


def test_our_schedules_reach_the_bars_in_the_papers_setting():
    rows, claims = nestpipe.our_rows(calibrate())
    assert claims["efficiency_1536"] >= 0.9717 and claims["speedup_1536"] >= 3.18
    assert any(not row["ships"] for row in rows) and len(rows) == 9


def test_turbogr_rows_say_where_they_agree():
    rows = turbogr.turbogr_rows()
    assert len(rows) == 3 + 1 + 2 + 7
    assert all(row["where"] for row in rows)
    assert all(row["within_10"] == (abs(row["error"]) <= 0.10) for row in rows)


def metered_rank(names: list[str], stage: list[list[float]]) -> dict[str, Any]:
    """What one rank of the reality check metered, every stage alike."""
    return {
        "stages": {"1": dict.fromkeys(names, stage), "8": dict.fromkeys(names, stage * 8)},
        "keys": {"keys": 1000.0, "overlap": 0.5},
        "core": 0,
        "wake_idle": 0.0,
        "wake_busy": 0.0,
    }


def test_metered_stages_become_tasks_and_buffers_read_less():
    stage = [[0.002, 0.001, 100.0, 1.0]]
    names = [each.name for each in make_schedule("serial").stages]
    metered = metered_rank(names, stage)
    known = reality.Calibration([metered, metered | {"core": 1}])
    serial = known.costs(make_schedule("serial"), 1e4)
    double = known.costs(make_schedule("dual_buffer"), 1e4)
    assert serial(0, Task("retrieve", 0)).waits == pytest.approx(0.1)
    assert double(0, Task("retrieve", 0)).waits == pytest.approx(0.05)
    assert serial(0, Task("answer", 0)).rounds == 1 and serial(0, Task("compute", 0)).rounds == 0
    plain = reality.simulated_step(known, "serial", 1, None, None)
    assert plain == pytest.approx(0.001 * len(names))
    slow = reality.simulated_step(known, "serial", 1, 1e4, None)
    assert slow == pytest.approx(plain + 4 * 0.01)


def test_a_link_that_holds_long_exchanges_up_lengthens_their_steps():
    rate, sizes = 1e6, np.array(reality.EXCHANGED_BYTES, float)
    held = 1.5 * sizes  # bytes as if half as many again were sent; 16,000 of them at once
    seconds = ((held - 16_000) / rate + 0.001).tolist()
    curve = reality.LinkCurve(rate, 0.001, seconds)
    assert curve.factor(100.0) == 1.0 and curve.factor(16_000) == 1.0
    assert curve.factor(64_000) == pytest.approx(1.5) == curve.factor(1e9)
    assert 1.0 < curve.factor(20_000) < 1.5
    free = reality.LinkCurve(rate, 0.001, [0.001] * len(sizes))
    assert free.factor(512_000) == 1.0


def test_the_present_model_of_the_link_stands_beside_the_older_ones():
    names = [each.name for each in make_schedule("serial").stages]
    stage = [[0.002, 0.001, 64_000.0, 1.0]]
    metered = metered_rank(names, stage)
    seconds = [1.5 * size / 1e6 for size in reality.EXCHANGED_BYTES]
    samples = {f"{name} {micro}": [0.3, 0.3] for name, micro in reality.SCHEDULES}
    rates = [
        {"load": load, "rate": rate, "read_rate": None, "samples": samples}
        for load, rate in ((None, None), (1.0, 1e6))
    ]
    part = {"ranks": 2, "tier": "memory", "metered": [metered, metered | {"core": 1}]}
    part |= {"exchanges": {"rate": 1e6, "seconds": seconds}, "rows": rates}
    rows = {row["variant"]: row for row in reality.compare(part)}
    free, slow = rows["2 ranks, memory, no limit: serial"], rows["2 ranks, memory, 1: serial"]
    assert free["error"] == free["error_second_model"] == free["error_first_model"]
    # Four exchanges, each with 16,000 more bytes held up than the burst sends at once.
    assert slow["error"] > slow["error_second_model"] == slow["error_first_model"]


def test_parts_run_alone_and_a_short_run_claims_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "QUICK_REQUESTS", 200)
    found = bench.run(True, tmp_path / "found.json", "million")
    assert json.loads((tmp_path / "found.json").read_text())["claims"] == found["claims"] == {}
    [row] = found["rows"]
    told = row["samples"]["report"]
    assert (told["requests"], told["instances"]) == (200, 100)
    assert row["serving_million_seconds"] > 0
    with pytest.raises(SlipstreamError, match="no part is called 'milion'"):
        bench.run(True, None, "milion")


def test_other_parts_of_a_recorded_result_stay_and_name_their_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "QUICK_REQUESTS", 200)
    result = tmp_path / "recorded.json"
    rows = [{"part": "reality", "variant": "a"}, {"part": "million", "variant": "old"}]
    claims = {"reality_rows": 1.0, "serving_million_seconds": 9.0}
    made = {"command": "all", "commit": "abc", "machine": {}, "when": "then"}
    result.write_text(json.dumps(made | {"rows": rows, "claims": claims}))
    found = bench.run(True, None, "million", result)
    assert found["rows"][0] == made | {"part": "reality", "variant": "a"}
    assert found["rows"][1]["when"] == found["when"] and found["command"] == "all"
    assert [row["part"] for row in found["rows"]] == ["reality", "million"]
    assert found["rows"][1]["variant"] != "old" and found["claims"]["reality_rows"] == 1.0
    assert found["commit"].startswith("abc, ")


def test_a_million_requests_are_claimed(monkeypatch):
    monkeypatch.setattr(bench, "REQUESTS", 300)
    _, claims = bench.million_rows(False)
    assert set(claims) == {
        "serving_million_seconds",
        "serving_million_cpu_seconds",
        "serving_million_peak_bytes",
    }
