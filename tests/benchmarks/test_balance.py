"""Balancing a step over ranks never changes its gradient, and figures follow from the times."""

import numpy as np
import pytest
import torch

from benchmarks.balance.ranks import (
    VARIANTS,
    Setting,
    figures,
    fit_cost,
    global_mean,
    gradient_of_sum,
    launch,
    measure,
)
from slipstream.bench.step_samples import batch_of
from slipstream.data.balance import Cost, assign
from slipstream.training.features import Features
from slipstream.training.recommender import Recommender

SMALL = Setting(
    cap=24, per_rank=3, steps=2, repeats=1, dim=16, heads=2, blocks=1, seconds_allowed=250
)
LENGTHS = np.array([24, 2, 9, 1, 15, 7])


def gradients(dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Each rank's summed gradient under balancing, and that of one rank with everything."""
    recommender = Recommender(SMALL.recipe(), Features(5_000), dtype=dtype)
    whole, ranks = (
        batch_of(LENGTHS.tolist(), 5_000, seed=1),
        assign(LENGTHS, 2, balance="lpt", cost=Cost(1.0, 0.1)),
    )
    parts = [
        gradient_of_sum(recommender, whole.take(torch.from_numpy(np.flatnonzero(ranks == rank))), 3)
        for rank in range(2)
    ]
    return parts, gradient_of_sum(recommender, whole, 3)


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_two_balanced_ranks_have_the_gradient_of_one(dtype, allowed):
    parts, alone = gradients(dtype)
    assert sum(int(part[-1]) for part in parts) == LENGTHS.sum()
    together, wanted = global_mean(parts[0] + parts[1]), global_mean(alone)
    assert float((together - wanted).abs().max() / wanted.abs().max()) <= allowed


def test_averaging_the_ranks_own_means_would_be_wrong():
    parts, alone = gradients(torch.float64)
    averaged, wanted = (global_mean(parts[0]) + global_mean(parts[1])) / 2, global_mean(alone)
    assert float((averaged - wanted).abs().max() / wanted.abs().max()) > 1e-3


def test_real_ranks_agree_and_report():
    found = measure(setting=SMALL)
    assert found["gradient_error"]["fp64"] <= 1e-12
    assert found["gradient_error"]["fp32"] <= 1e-5
    assert [row["variant"] for row in found["rows"]] == list(VARIANTS)
    for row in found["rows"]:
        assert len(row["samples"]) == SMALL.steps
        assert 0 <= row["imbalance"] <= 0.5
    assert found["rows"][1]["imbalance_predicted"] <= found["rows"][0]["imbalance_predicted"]
    assert found["imbalance_measured"] == found["rows"][1]["imbalance"]


def test_a_rank_that_fails_is_reported():
    with pytest.raises(RuntimeError, match=r"rank \d of benchmarks.balance.ranks failed"):
        launch(Setting(cap=24, dim=15, heads=2, seconds_allowed=250))


def test_figures_are_the_wait_for_the_slowest_over_the_step():
    def entry(step: int, compute: float, whole: float) -> dict:
        return {
            "variant": "lpt",
            "step": step,
            "compute": compute,
            "cpu": compute,
            "step_seconds": whole,
        }

    fast = [entry(0, 1.0, 4.0), entry(0, 9.0, 4.0), entry(0, 1.0, 4.0), entry(1, 2.0, 4.0)]
    slow = [entry(0, 3.0, 4.0), entry(0, 3.0, 4.0), entry(0, 3.0, 9.0), entry(1, 2.0, 4.0)]
    row = figures("lpt", [fast, slow], 2)
    assert row["samples"] == [pytest.approx(0.25), 0.0]
    assert row["imbalance"] == pytest.approx(0.125)


def test_costs_are_fitted_without_the_constant_of_a_step():
    lengths = np.array([100, 200, 400, 800])
    cost = fit_cost(lengths, 0.5 + 2e-3 * lengths + 3e-6 * lengths**2)
    assert cost.linear == pytest.approx(2e-3, rel=1e-6)
    assert cost.quadratic == pytest.approx(3e-6, rel=1e-6)
    falling = fit_cost(lengths, 1.0 + 1e-3 * lengths - 5e-7 * lengths**2)
    assert falling.linear > 0
    assert falling.quadratic == 0
