"""The cost model is fitted to this machine, never negative, learns, and forgets."""

import numpy as np
import pytest

from slipstream.serving.instance.cost_model import CostModel, non_negative_fit
from tests.support.fake_clock import FakeClock
from tests.support.serving_samples import engine


def test_the_fit_finds_the_coefficients_and_never_goes_negative():
    true = np.array([1e-3, 2e-5, 3e-9, 1e-7])
    shapes = [(16, 0), (64, 64), (128, 1024), (512, 0), (512, 1536), (64, 3072)]
    model = CostModel(true, 0.0)
    found = CostModel.fit([(t, p, model.pass_seconds(t, p)) for t, p in shapes], 1e-10)
    assert found.coefficients == pytest.approx(true, rel=1e-6)
    rng = np.random.default_rng(0)
    for _ in range(50):
        x, y = rng.random((6, 4)), rng.random(6) + 0.1
        assert (non_negative_fit(x, y) >= 0).all()


def test_the_model_measures_this_machine_and_follows_it(tmp_path):
    cost = CostModel.measure(engine(tmp_path, blocks=1), seconds=0.2)
    assert cost.pass_seconds(512, 1536) > cost.pass_seconds(16, 0) > 0
    assert cost.prefill_seconds(2000) > cost.prefill_seconds(2000, past=1500) > 0
    assert cost.prefill_seconds(100, past=100) == 0
    cost.clock = FakeClock()  # nothing fades
    before, prefill = cost.pass_seconds(100, 0), cost.prefill_seconds(500)
    for _ in range(300):
        predicted = cost.pass_seconds(100, 0)
        cost.observe("inline", predicted, 3 * before)
    assert cost.pass_seconds(100, 0) == pytest.approx(3 * before, rel=0.02)
    assert cost.prefill_seconds(500) == prefill  # other work, other conditions
    assert cost.tail_seconds(cost.pass_seconds(100, 0), "inline") >= 3 * before * 0.98
    cost.slice_seconds = 1e9
    assert cost.chunk_for(4000) == 2048
    cost.slice_seconds = 0.0
    assert cost.chunk_for(4000) == 256


def test_what_was_learnt_fades_where_nothing_confirms_it():
    clock = FakeClock()
    cost = CostModel(np.array([0.01, 0.0, 0.0, 0.0]), 1e-9, clock=clock)
    for _ in range(200):
        # An interruption counts as four times the expected, no more.
        cost.observe("prefill", cost.prefill_seconds(10), 9.0)
    assert cost.factor("prefill") == pytest.approx(4.0, rel=0.01)
    assert cost.tail_seconds(1.0, "prefill") >= 1.0
    clock.moment = 5.0
    assert 1.5 < cost.factor("prefill") < 2.5
    clock.moment = 60.0
    assert cost.factor("prefill") == pytest.approx(1.0, abs=0.01)
    assert cost.tail_seconds(1.0, "prefill") == pytest.approx(1.5, abs=0.01)


def test_what_was_measured_survives_as_json():
    fill = np.array([2e-3, 1e-5, 0.0, 0.0])
    cost = CostModel(np.array([1e-3, 2e-5, 3e-9, 1e-7]), 1e-10, fill)
    again = CostModel.of(cost.measured())
    assert again.prefill_seconds(700, past=100) == cost.prefill_seconds(700, past=100)
    assert again.pass_seconds(64, 512) == cost.pass_seconds(64, 512)
    assert CostModel.of(CostModel(cost.coefficients, 0.0).measured()).fill_coefficients is None
    cost.inline_coefficients = (1e-3, 0.0, 0.0, 0.0)
    assert CostModel.of(cost.measured()).pass_seconds(64, 0) == 1e-3 < cost.pass_seconds(64, 512)


def test_a_ranking_in_line_is_predicted_by_rankings_in_line(tmp_path, monkeypatch):
    # Only the candidates attend in its last layer, so it is cheaper than a pass over all tokens.
    served, clock = engine(tmp_path, blocks=1), FakeClock()

    def takes(seconds):
        def work(*_, **__):
            clock.moment += seconds

        return work

    monkeypatch.setattr(served, "rank_batch", takes(0.005))
    monkeypatch.setattr(served, "run_pass", takes(0.05))
    cost = CostModel.measure(served, seconds=0.2, clock=clock)
    assert cost.plain_seconds(500, 0) == pytest.approx(0.005, rel=0.01)
    assert cost.plain_seconds(100, 500) == pytest.approx(0.05, rel=0.01)


def test_others_that_use_the_machine_at_the_start_do_not_change_what_a_pass_costs(
    tmp_path, monkeypatch
):
    served, clock = engine(tmp_path, blocks=1), FakeClock()
    rng = np.random.default_rng(0)

    def mostly_slow(*_, **__):
        clock.moment += 0.05 if rng.random() < 0.55 else 0.01

    monkeypatch.setattr(served, "rank_batch", mostly_slow)
    monkeypatch.setattr(served, "run_pass", mostly_slow)
    cost = CostModel.measure(served, seconds=20.0, clock=clock)
    assert cost.plain_seconds(500, 0) == pytest.approx(0.01, rel=0.01)
    assert cost.plain_seconds(100, 500) == pytest.approx(0.01, rel=0.01)


def test_a_history_that_fits_a_slice_is_one_chunk():
    cost = CostModel(np.array([0.0, 0.0, 2e-9, 0.0]), 0.0, slice_seconds=0.008, layers=1)
    assert cost.chunk_for(2048) == 2048  # 2,048 tokens, none behind them: 4 milliseconds
    assert cost.chunk_for(8192) == 512  # half-way there are 3,840 tokens before a chunk
