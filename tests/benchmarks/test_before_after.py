"""Two versions of the small step are held against each other."""

import pytest

from benchmarks.before_after import bench
from slipstream.errors import SlipstreamError


def test_a_version_equals_itself_and_every_job_has_its_row():
    rows = bench.measure(bench.ROOT, bench.QUICK, threads=1, rounds=1)
    claims = bench.claims_of(rows)
    assert [row["variant"] for row in rows] == [
        "ml-1m-hstu step, 1 thread",
        "full softmax, 1 thread",
    ]
    assert claims["largest_difference"] == 0
    assert claims["full_softmax_1_mfu"] > 0 and claims["ml_1m_hstu_step_1_speedup"] > 0


def test_versions_that_compute_something_else_give_no_result(monkeypatch, tmp_path):
    row = {"variant": "ml-1m-hstu step, 1 thread", "speedup": 9.0, "difference": 1e-4}
    monkeypatch.setattr(bench, "built", lambda commit, work: tmp_path)
    monkeypatch.setattr(bench, "measure", lambda *arguments: [row])
    with pytest.raises(SlipstreamError, match=r"differ by 0\.0001 of a value"):
        bench.run(quick=True, json_path=tmp_path / "result.json")
    assert not (tmp_path / "result.json").exists()


def test_a_clone_without_the_commit_is_told_how_to_get_it(tmp_path):
    with pytest.raises(SlipstreamError, match="unshallow"):
        bench.built("0" * 40, tmp_path)
    assert list(tmp_path.iterdir()) == []
