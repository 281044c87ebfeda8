"""Each of the trigger's four questions refuses on its own, with its own reason; the cost model is
fitted, and it learns.
"""

from dataclasses import replace

import numpy as np
import pytest

from slipstream.serving.instance.cost_model import CostModel, non_negative_fit
from slipstream.serving.instance.instance_load import RecentWaits, keep_newest, window_start
from slipstream.serving.instance.trigger import Prospect, Trigger, TriggerConfig
from tests.support.serving_samples import engine

GOOD = Prospect(
    inline_tail=0.2,
    prefill=0.05,
    queued=0.0,
    nbytes=10,
    pinned=0,
    capacity=100,
    rank=0.03,
    rank_in=0.05,
    budget=0.08,
)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, "admitted"),
        ({"inline_tail": 0.03}, "not_at_risk"),
        ({"pinned": 71}, "no_room"),
        ({"nbytes": 81}, "no_room"),
        ({"queued": 0.06}, "too_late"),
        ({"prefill": 0.11}, "admitted"),  # idle: tried, though it is thought to take too long
        ({"prefill": 0.11, "queued": 0.001}, "too_late"),
        ({"prefill": 0.21}, "too_late"),
        ({"rank": 0.11}, "too_late"),
    ],
)
def test_each_question_has_its_reason(change, reason):
    trigger = Trigger(TriggerConfig(), now=0.0)
    assert trigger.decide(replace(GOOD, **change), 0.0) == reason
    assert trigger.counts == {reason: 1}


def test_the_bucket_bounds_pre_inference_time():
    trigger = Trigger(TriggerConfig(compute_share=0.5, burst_seconds=0.2), now=0.0)
    reasons = [trigger.decide(GOOD, 0.001 * i) for i in range(6)]
    assert reasons[:4] == ["admitted"] * 4 and reasons[4:] == ["overload"] * 2
    assert trigger.decide(GOOD, 0.11) == "admitted"  # 0.1 s later half of that has come back
    admitted = sum(trigger.decide(GOOD, 1 + 0.01 * i) == "admitted" for i in range(1000))
    assert admitted * GOOD.prefill == pytest.approx(0.5 * 10 + 0.2, abs=0.15)


def test_a_prefill_longer_than_the_burst_is_not_refused_for_ever():
    trigger = Trigger(TriggerConfig(compute_share=0.5, burst_seconds=0.1), now=0.0)
    long = replace(GOOD, prefill=0.4, rank_in=1.0)
    assert [trigger.decide(long, at) for at in (0.0, 0.1, 2.0)] == [
        "admitted",
        "overload",
        "admitted",
    ]


def test_littles_law_refuses_what_will_not_fit():
    trigger = Trigger(TriggerConfig(live_seconds=2.0, burst_seconds=100.0), now=0.0)
    reasons = [
        trigger.decide(replace(GOOD, nbytes=5), 0.1 * (i + 1)) for i in range(60)
    ]  # 10 a second x 2 s x 5 bytes > 80
    assert reasons[0] == "admitted" and "no_room" in reasons
    calm = Trigger(TriggerConfig(live_seconds=2.0, burst_seconds=100.0), now=0.0)
    assert {calm.decide(replace(GOOD, nbytes=5), 1.0 * (i + 1)) for i in range(60)} == {
        "admitted"
    }  # 1 a second


def test_switched_off_it_admits_everything():
    trigger = Trigger(TriggerConfig(enabled=False), now=0.0)
    assert (
        trigger.decide(replace(GOOD, inline_tail=0.0, pinned=1000, queued=9.0), 0.0) == "admitted"
    )


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
    now = [0.0]
    cost = CostModel(np.array([0.01, 0.0, 0.0, 0.0]), 1e-9, clock=lambda: now[0])
    for _ in range(200):
        cost.observe(
            "prefill", cost.prefill_seconds(10), 9.0
        )  # an interruption counts as four times the expected, no more
    assert cost.factor("prefill") == pytest.approx(4.0, rel=0.01)
    assert cost.tail_seconds(1.0, "prefill") >= 1.0
    now[0] = 5.0
    assert 1.5 < cost.factor("prefill") < 2.5
    now[0] = 60.0
    assert cost.factor("prefill") == pytest.approx(1.0, abs=0.01)
    assert cost.tail_seconds(1.0, "prefill") == pytest.approx(1.5, abs=0.01)


def test_waits_windows_and_truncation():
    waits = RecentWaits(horizon=5.0)
    assert waits.tail(0.0) == 0.0
    for i in range(100):
        waits.add(1.0, 0.001 * i)
    assert waits.tail(2.0) == pytest.approx(0.099)
    assert waits.tail(7.0) == 0.0
    assert [window_start(n, 80) for n in (1, 80, 81, 90, 91, 1000)] == [0, 0, 10, 10, 20, 920]
    assert all(70 <= n - window_start(n, 80) <= 80 for n in range(81, 500))
    assert keep_newest(100, 0.5, lambda n: n * 0.01) == 50
    assert keep_newest(100, 5.0, lambda n: n * 0.01) == 100
    assert keep_newest(100, 0.001, lambda n: n * 0.01) == 0
