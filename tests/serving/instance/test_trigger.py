"""Each of the trigger's rules refuses on its own, with its own reason."""

from dataclasses import replace

import pytest

from slipstream.serving.instance.trigger import Prospect, Trigger, TriggerConfig
from tests.support.fake_clock import FakeClock

GOOD = Prospect(
    inline_tail=0.2,
    waiting=0.0,
    saved=0.02,
    prefill=0.05,
    queued=0.0,
    nbytes=10,
    pinned=0,
    capacity=100,
    rank=0.03,
    rank_in=0.05,
    budget=0.08,
)


def decide_at(trigger, prospect, moment):
    trigger.clock.moment = moment
    return trigger.decide(prospect)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, "admitted"),
        ({"inline_tail": 0.03}, "not_at_risk"),
        ({"inline_tail": 0.01, "waiting": 0.02}, "not_at_risk"),
        ({"inline_tail": 0.03, "waiting": 0.2, "saved": 0.0159}, "gains_little"),  # longer queues
        ({"inline_tail": 0.03, "waiting": 0.2, "saved": 0.0161}, "admitted"),
        ({"saved": 0.0031}, "admitted"),  # at risk by itself
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
    trigger = Trigger(TriggerConfig(), FakeClock())
    assert trigger.decide(replace(GOOD, **change)) == reason
    assert trigger.counts == {reason: 1}


def test_the_bucket_bounds_pre_inference_time():
    trigger = Trigger(TriggerConfig(compute_share=0.5, burst_seconds=0.2), FakeClock())
    reasons = [decide_at(trigger, GOOD, 0.001 * i) for i in range(6)]
    assert reasons[:4] == ["admitted"] * 4 and reasons[4:] == ["overload"] * 2
    assert decide_at(trigger, GOOD, 0.11) == "admitted"  # 0.1 s later half of that has come back
    admitted = sum(decide_at(trigger, GOOD, 1 + 0.01 * i) == "admitted" for i in range(1000))
    assert admitted * GOOD.prefill == pytest.approx(0.5 * 10 + 0.2, abs=0.15)


def test_a_prefill_longer_than_the_burst_is_not_refused_for_ever():
    trigger = Trigger(TriggerConfig(compute_share=0.5, burst_seconds=0.1), FakeClock())
    long = replace(GOOD, prefill=0.4, rank_in=1.0)
    assert [decide_at(trigger, long, at) for at in (0.0, 0.1, 2.0)] == [
        "admitted",
        "overload",
        "admitted",
    ]


def test_littles_law_refuses_what_will_not_fit():
    trigger = Trigger(TriggerConfig(live_seconds=2.0, burst_seconds=100.0), FakeClock())
    # 10 a second x 2 s x 5 bytes > 80
    reasons = [decide_at(trigger, replace(GOOD, nbytes=5), 0.1 * (i + 1)) for i in range(60)]
    assert reasons[0] == "admitted" and "no_room" in reasons
    calm = Trigger(TriggerConfig(live_seconds=2.0, burst_seconds=100.0), FakeClock())
    once_a_second = {decide_at(calm, replace(GOOD, nbytes=5), 1.0 * (i + 1)) for i in range(60)}
    assert once_a_second == {"admitted"}


def test_switched_off_it_admits_everything():
    trigger = Trigger(TriggerConfig(enabled=False), FakeClock())
    assert trigger.decide(replace(GOOD, inline_tail=0.0, pinned=1000, queued=9.0)) == "admitted"


def test_a_busy_minute_is_forgotten_within_seconds():
    trigger = Trigger(TriggerConfig(live_seconds=2.0, burst_seconds=100.0), FakeClock())
    small = replace(GOOD, nbytes=5, prefill=0.001)
    busy = [decide_at(trigger, small, i / 100) for i in range(6_000)]
    assert busy[-1] == "no_room"
    later = [decide_at(trigger, small, 65.0 + i) for i in range(3_600)]
    assert set(later) == {"admitted"}


def test_the_rate_of_admissions_is_that_of_the_last_seconds():
    trigger = Trigger(TriggerConfig(burst_seconds=100.0), FakeClock())
    for i in range(200):
        decide_at(trigger, replace(GOOD, nbytes=1), i / 5)
    assert trigger.admissions_per_second == pytest.approx(5.0, rel=0.1)
    trigger.clock.moment += 20.0
    assert trigger.admissions_per_second < 0.001
