"""The serving benchmark against the real server: announced, ranked, judged and exact."""

from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.serving.bench import QUICK, ServingBench
from benchmarks.serving.runs import RunPlan
from benchmarks.serving.server import RELAY, VARIANTS
from benchmarks.serving.users import Population


@pytest.mark.slow
def test_runs_of_a_relay_are_exact_and_kept(tmp_path: Path):
    bench = ServingBench(QUICK, tmp_path, Console(quiet=True))
    population = Population("96", 400, QUICK.num_items, 96)
    flags = ("--no-trigger",)  # on a slow machine it would refuse what this test is about
    plans = [
        RunPlan(RELAY, population, "S", 0.0, "service", flags=flags),
        RunPlan(RELAY, population, "S", 20.0, "ablation", flags=flags, candidates=20),
        RunPlan(RELAY, population, "N", 40.0, "verdict", flags=flags, candidates=20),
        RunPlan(VARIANTS["W1"], population, "N", 0.0, "service", candidates=20),
    ]
    small = bench.runner.sizes.__class__(ablation=40, verdict=40, service=6, lead_in=5, attempts=1)
    bench.runner.sizes = small
    try:
        with bench.witness:
            service, sessions, verdict, inline = map(bench.runner.run, plans)
        assert bench.deployment.started == 2  # side by side, one for each variant
    finally:
        bench.deployment.close()
    assert service["rank_ms"] > 0 and service["hit_ms"] > 0
    assert inline["rank_ms"] > 0 and "hit_ms" not in inline
    assert not sessions["samples"]["errors"] and sessions["requests"] == 40
    assert sum(sessions["samples"]["hits"].values()) == 40
    assert sessions["samples"]["hits"].get("inline", 0) < 40
    assert sessions["score_diff"] == verdict["score_diff"] == 0.0
    assert verdict["longest_pause_ms"] is None or verdict["longest_pause_ms"] >= 0.0
    assert verdict["verdict"] in ("VALID", "INVALID") and verdict["requests"] == 40
    again = ServingBench(QUICK, tmp_path, Console(quiet=True))
    assert again.runner.run(plans[2]) == verdict and again.deployment.started == 0
