"""Each of the trigger's four rules refuses on its own, with its own reason."""

from dataclasses import replace

import pytest

from slipstream.serving.instance.trigger import Prospect, Trigger, TriggerConfig

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
def test_each_rule_has_its_reason(change, reason):
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
    # 10 a second x 2 s x 5 bytes > 80
    reasons = [trigger.decide(replace(GOOD, nbytes=5), 0.1 * (i + 1)) for i in range(60)]
    assert reasons[0] == "admitted" and "no_room" in reasons
    calm = Trigger(TriggerConfig(live_seconds=2.0, burst_seconds=100.0), now=0.0)
    once_a_second = {calm.decide(replace(GOOD, nbytes=5), 1.0 * (i + 1)) for i in range(60)}
    assert once_a_second == {"admitted"}


def test_switched_off_it_admits_everything():
    trigger = Trigger(TriggerConfig(enabled=False), now=0.0)
    assert (
        trigger.decide(replace(GOOD, inline_tail=0.0, pinned=1000, queued=9.0), 0.0) == "admitted"
    )
