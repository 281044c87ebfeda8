"""The balance benchmark writes its figures as JSON, from whatever data sets are there."""

import json

import pytest

from benchmarks.balance import bench
from tests.support.data_fixtures import store_with_lengths


def test_bench_balance_writes_its_json(tmp_path, monkeypatch, capsys):
    store_with_lengths(tmp_path / "x", [5, 9, 30, 4]).directory.rename(tmp_path / "ml-1m")
    monkeypatch.setenv("SLIPSTREAM_DATA", str(tmp_path))
    monkeypatch.setattr(bench, "RANKS", (2, 64))
    monkeypatch.setattr(bench, "QUICK_STEPS", 2)
    monkeypatch.setattr(bench, "MANY_PER_RANK", 12)
    # The real ranks have tests of their own (test_bench_balance_ranks.py).
    setting = {"per_rank": 8, "cap": 4096, "steps": 2, "repeats": 3}
    waits = [
        {
            "variant": name,
            "imbalance": wait,
            "imbalance_cpu": wait,
            "imbalance_predicted": wait,
            "step_seconds": 1.0,
        }
        for name, wait in (("fixed count (baseline)", 0.2), ("lpt", 0.01))
    ]
    measured = {"setting": setting, "gradient_error": {"fp32": 1e-7, "fp64": 1e-16}, "rows": waits}
    measured |= {"imbalance_measured": 0.01, "imbalance_measured_baseline": 0.2}
    monkeypatch.setattr(bench.balance_ranks, "measure", lambda quick: measured)
    result = bench.run(quick=True, json_path=tmp_path / "balance.json")
    claims = json.loads((tmp_path / "balance.json").read_text())["claims"]
    assert claims == pytest.approx(result["claims"])
    assert claims["imbalance_64_ranks"] < 0.024 < claims["imbalance_64_ranks_baseline"]
    assert (claims["imbalance_measured"], claims["imbalance_measured_baseline"]) == (0.01, 0.2)
    assert result["absent"] == ["ml-latest-small", "kuairand-pure"]
    assert {row["lengths"] for row in result["rows"]} >= {"ml-1m", "ml-1m, cap 200"}
    assert "left out: ml-latest-small" in capsys.readouterr().out.replace("\n", " ")
