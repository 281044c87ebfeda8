"""The instance for a request: the user's first usable one, within the bound on its load."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.serving.router.balancer import (
    CircuitBreaker,
    InstanceState,
    LoadBalancer,
    instance_order,
)

USERS = [f"user-{number}" for number in range(200)]


def fleet(count: int) -> list[InstanceState]:
    return [
        InstanceState(f"i-{number}", f"http://127.0.0.1:{9000 + number}") for number in range(count)
    ]


def test_users_without_load_go_to_the_first_of_their_order():
    balancer = LoadBalancer(fleet(8))
    for user in USERS:
        assert balancer.choose(user, 1, 0.0) is instance_order(user, balancer.instances)[0]


def test_a_dead_primary_hands_over_to_the_second_in_order():
    instances = fleet(5)
    balancer = LoadBalancer(instances)
    for user in USERS:
        first, second = instance_order(user, instances)[:2]
        first.ready = False
        assert balancer.choose(user, 1, 0.0) is second
        first.ready = True
        assert balancer.choose(user, 1, 0.0) is first


def test_a_draining_owner_is_left_alone_even_with_a_ticket():
    instances = fleet(3)
    balancer = LoadBalancer(instances)
    order = instance_order("ann", instances)
    assert balancer.choose("ann", 1, 0.0, owner=order[2].name) is order[2]
    order[2].draining = True
    assert balancer.choose("ann", 1, 0.0, owner=order[2].name) is order[0]


def test_a_ticket_for_an_instance_nobody_knows_is_served_in_order():
    balancer = LoadBalancer(fleet(3))
    assert (
        balancer.choose("ann", 1, 0.0, owner="gone") is instance_order("ann", balancer.instances)[0]
    )


def test_a_saturated_primary_is_passed_over_and_returns():
    instances = fleet(4)
    balancer = LoadBalancer(instances, slack_tokens=0)
    first, second = instance_order("ann", instances)[:2]
    first.reported = 10_000
    assert balancer.choose("ann", 100, 0.0) is second
    first.reported = 0
    assert balancer.choose("ann", 100, 0.0) is first


def test_a_ticket_holds_against_load():
    instances = fleet(4)
    balancer = LoadBalancer(instances, slack_tokens=0)
    owner = instance_order("ann", instances)[0]
    owner.reported = 10_000
    assert balancer.choose("ann", 100, 0.0, owner=owner.name) is owner


def test_affinity_does_not_vanish_on_an_idle_fleet():
    instances = fleet(4)
    balancer = LoadBalancer(instances, slack_tokens=1_000)
    first = instance_order("ann", instances)[0]
    first.reported = 900  # all the load there is, but little
    assert balancer.choose("ann", 500, 0.0) is first


def test_a_burst_on_one_user_spreads_within_the_bound():
    balancer = LoadBalancer(fleet(4), load_factor=1.25, slack_tokens=0)
    with contextlib.ExitStack() as leases:
        for _ in range(100):  # none has answered yet: only counting before sending sees the burst
            instance = balancer.choose("ann", 100, 0.0)
            assert instance is not None
            leases.enter_context(balancer.outstanding(instance, 100, 0.0))
        loads = sorted(instance.outstanding for instance in balancer.instances)
        assert sum(loads) == 100 * 100
        assert loads[-1] <= 1.25 * sum(loads) / 4 + 100
    assert [instance.outstanding for instance in balancer.instances] == [0] * 4


def test_a_failed_request_is_no_longer_outstanding():
    balancer = LoadBalancer(fleet(1))
    with pytest.raises(RuntimeError), balancer.outstanding(balancer.instances[0], 7, 0.0):
        raise RuntimeError
    assert balancer.instances[0].outstanding == 0


@given(
    loads=st.lists(st.integers(0, 10_000), min_size=1, max_size=6),
    tokens=st.integers(1, 5_000),
    user=st.text(max_size=10),
)
def test_only_the_least_loaded_is_ever_loaded_beyond_the_bound(
    loads: list[int], tokens: int, user: str
):
    instances = fleet(len(loads))
    for instance, load in zip(instances, loads, strict=True):
        instance.reported = load
    chosen = LoadBalancer(instances, slack_tokens=0).choose(user, tokens, 0.0)
    assert chosen is not None
    bound = 1.25 * (sum(loads) + tokens) / len(loads)
    assert chosen.load + tokens <= bound or chosen.load == min(loads)


def test_long_and_short_requests_keep_apart_while_both_pools_live():
    instances = [
        InstanceState(f"i-{n}", "http://x:1", pool="long" if n < 2 else "short") for n in range(4)
    ]
    balancer = LoadBalancer(instances, long_from=1_000)
    assert {balancer.choose(user, 5_000, 0.0).pool for user in USERS[:100]} == {"long"}
    assert {balancer.choose(user, 10, 0.0).pool for user in USERS[:100]} == {"short"}
    for instance in instances[:2]:
        instance.ready = False
    assert {balancer.choose(user, 5_000, 0.0).pool for user in USERS[:100]} == {"short"}


def test_no_instance_left_is_none():
    balancer = LoadBalancer(fleet(2))
    assert balancer.choose("ann", 1, 0.0, tried={"i-0", "i-1"}) is None


def test_a_breaker_opens_lets_one_trial_pass_and_closes():
    breaker = CircuitBreaker(threshold=3, cooldown=1.0)
    for _ in range(2):
        breaker.note_failure(0.0)
    assert breaker.allows(0.0)
    breaker.note_failure(0.0)
    assert not breaker.allows(0.9)
    assert breaker.allows(1.0)
    breaker.note_request(1.0)  # the trial is sent: no other request follows it yet
    assert not breaker.allows(1.5)
    breaker.note_failure(1.6)
    assert not breaker.allows(2.5)
    assert breaker.allows(2.6)
    breaker.note_success()
    assert breaker.allows(2.6)


def test_names_must_differ():
    with pytest.raises(ValueError, match="own name"):
        LoadBalancer([InstanceState("a", "http://x:1"), InstanceState("a", "http://x:2")])
