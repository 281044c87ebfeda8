"""The benchmark of automatic schedules: its runs, its limits, its claims, and going on."""

import json
from pathlib import Path

import pytest

from benchmarks.auto_schedule import bench, rank
from benchmarks.auto_schedule.bench import SETTINGS, Turns, claims_of, limits, rows_of
from benchmarks.auto_schedule.rank import Job
from slipstream.errors import SlipstreamError
from tests.support.training_fixtures import small_store


def sample(seconds, loss=2.0, phases=()):
    return {"step_seconds": seconds, "loss": loss, "phases": list(phases), "distinct_rows": 100.0}


@pytest.fixture
def job(tmp_path):
    store = small_store(tmp_path / "store")
    sizes = {"steps": 4, "steps_a_turn": 2, "users": 2, "length": 8, "dim": 8, "cache_rows": 4}
    return Job(str(store.directory), ranks=1, tier="disk", **sizes)


@pytest.mark.system
def test_a_turn_is_made_once_and_reports_what_each_run_took(job, tmp_path):
    turns = Turns(tmp_path / "work", job, None)
    nested = Job(**{**vars(job), "schedule": "nested", "read_rate": 1e6})
    found = turns.turn("a", {"plain": job, "nested": nested})
    for sample_of in found.values():
        assert sample_of["distinct_rows"] > 1 and sample_of["phases"] == []
        assert len(sample_of["turns"]) == 2  # of two steps each
        assert sample_of["step_seconds"] == pytest.approx(sum(sample_of["turns"]) / 4)
    assert Turns(tmp_path / "work", job, None).turn("a", {}) == found
    with pytest.raises(SlipstreamError, match="other sizes"):
        Turns(tmp_path / "work", Job(**{**vars(job), "dim": 16}), None)


@pytest.mark.system
def test_two_ranks_train_together(job):
    together = Job(**{**vars(job), "ranks": 2, "tier": "memory"})
    assert bench.launch({"one": together}, None)["one"]["loss"] > 0
    assert together.recipe(Path("x")).sampler.batch_size == 4


@pytest.mark.system
def test_a_run_that_fails_ends_the_turn_of_all(job):
    with pytest.raises(RuntimeError, match="rank 0"):
        bench.launch({"good": job, "bad": Job(**{**vars(job), "store": "nowhere"})}, None)


def test_limits_give_a_free_step_its_shares(job):
    disk, link, both = SETTINGS[2], SETTINGS[4], SETTINGS[5]
    free = sample(0.1)
    assert limits(SETTINGS[0], job, free) == (None, None)
    assert limits(disk, job, free) == (pytest.approx(100 / 0.07), None)
    assert limits(link, job, free) == (None, pytest.approx(2 * 4 * 8 * 50 * 0.5 / 0.04))
    assert None not in limits(both, job, free)


def test_claims_are_the_worst_of_all_settings():
    phases = [{"schedule": "nested", "micro_batches": 4}]
    rows = rows_of(
        "a",
        {
            "synchronous": [sample(0.2), sample(0.4)],
            "auto": [sample(0.1, phases=phases), sample(0.2, phases=phases)],
            "synchronous again": [sample(0.25), sample(0.5)],
            "nested 8": [sample(0.09), sample(0.18)],
        },
    )
    assert [row["chosen"] for row in rows] == ["", "nested 4", "", ""]
    assert rows[1]["vs_plain"] == 2
    plain = [sample(0.1)]
    rows += rows_of(
        "b", {"synchronous": plain, "auto": [sample(0.1 / 0.99)], "synchronous again": plain}
    )
    assert claims_of(rows) == {
        "worst_vs_plain": pytest.approx(0.99),
        "worst_vs_best": pytest.approx(0.9),
        "equal_runs_differ_by": pytest.approx(0.2),
    }


def test_a_variant_that_learns_something_else_ends_the_benchmark():
    with pytest.raises(SlipstreamError, match="nothing to compare"):
        rows_of("a", {"synchronous": [sample(1.0)], "auto": [sample(1.0, loss=2.001)]})


@pytest.mark.slow
def test_the_quick_benchmark_runs(tmp_path):
    result = bench.run(True, tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text())["claims"] == result["claims"]
    assert len(result["rows"]) == 2 * len(bench.VARIANTS) and rank.__doc__
