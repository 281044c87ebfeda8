"""The checkpoint benchmark runs, checks the rows it saved, and computes claims from the turns."""

import pytest

from benchmarks import checkpoint as bench


def test_claims_are_the_mean_cost_and_the_median_bytes():
    uniform, popular = {"draws": bench.UNIFORM}, {"draws": bench.POPULAR}
    turns = [
        {**uniform, "cost_s": 2.0, "bytes": 90, "all rows": False},
        {**uniform, "cost_s": 4.0, "bytes": 100, "all rows": True},
        {**popular, "cost_s": 1.0, "bytes": 30, "all rows": False},
        {**popular, "cost_s": 2.0, "bytes": 50, "all rows": False},
        {**popular, "cost_s": 6.0, "bytes": 100, "all rows": True},
    ]
    claims = bench.claims_of(turns, 100, 300.0)
    assert claims == {
        "cost_share": pytest.approx(0.01),
        "cost_share_popular": pytest.approx(0.01),
        "bytes_incremental_ratio": pytest.approx(0.4),
    }
    assert "bytes_incremental_ratio" not in bench.claims_of(turns[:2] + turns[-1:], 100, 300.0)


@pytest.mark.system
def test_a_quick_run_measures_every_turn(monkeypatch):
    monkeypatch.setattr(bench.checkpoint, "WHOLE_BYTES", bench.checkpoint.WHOLE_BYTES)
    sizes = bench.Sizes(20_000, 16, 200, 0.1, 0.05, 1, 1, 2, 24, 4)
    monkeypatch.setattr(bench, "QUICK", sizes)
    found = bench.run(quick=True)
    assert [row["variant"] for row in found["rows"]] == ["whole", "turn 1", "turn 2"]
    assert 0 < found["claims"]["bytes_incremental_ratio"] < 1
