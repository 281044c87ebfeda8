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
from tests.support.fake_clock import FakeClock

USERS = [f"user-{number}" for number in range(200)]


def fleet(count: int) -> list[InstanceState]:
    return [
        InstanceState(f"i-{number}", f"http://127.0.0.1:{9000 + number}") for number in range(count)
    ]


def test_users_without_load_go_to_the_first_of_their_order():
    balancer = LoadBalancer(fleet(8))
    for user in USERS:
        assert balancer.choose(user, 1) is instance_order(user, balancer.instances)[0]


def test_a_dead_primary_hands_over_to_the_second_in_order():
    instances = fleet(5)
    balancer = LoadBalancer(instances)
    for user in USERS:
        first, second = instance_order(user, instances)[:2]
        first.ready = False
        assert balancer.choose(user, 1) is second
        first.ready = True
        assert balancer.choose(user, 1) is first


def test_a_draining_owner_is_left_alone_even_with_a_ticket():
    instances = fleet(3)
    balancer = LoadBalancer(instances)
    order = instance_order("ann", instances)
    assert balancer.choose("ann", 1, owner=order[2].name) is order[2]
    order[2].draining = True
    assert balancer.choose("ann", 1, owner=order[2].name) is order[0]


def test_a_ticket_for_an_instance_nobody_knows_is_served_in_order():
    balancer = LoadBalancer(fleet(3))
    assert balancer.choose("ann", 1, owner="gone") is instance_order("ann", balancer.instances)[0]


def test_a_saturated_primary_is_passed_over_and_returns():
    instances = fleet(4)
    balancer = LoadBalancer(instances, slack_behaviours=0)
    first, second = instance_order("ann", instances)[:2]
    first.reported = 10_000
    assert balancer.choose("ann", 100) is second
    first.reported = 0
    assert balancer.choose("ann", 100) is first


def test_a_ticket_holds_against_load():
    instances = fleet(4)
    balancer = LoadBalancer(instances, slack_behaviours=0)
    owner = instance_order("ann", instances)[0]
    owner.reported = 10_000
    assert balancer.choose("ann", 100, owner=owner.name) is owner


def test_affinity_does_not_vanish_on_an_idle_fleet():
    instances = fleet(4)
    balancer = LoadBalancer(instances, slack_behaviours=1_000)
    first = instance_order("ann", instances)[0]
    first.reported = 900  # all the load there is, but little
    assert balancer.choose("ann", 500) is first


def test_a_burst_on_one_user_spreads_within_the_bound():
    balancer = LoadBalancer(fleet(4), load_factor=1.25, slack_behaviours=0)
    with contextlib.ExitStack() as leases:
        for _ in range(100):  # none has answered yet: only counting before sending sees the burst
            instance = balancer.choose("ann", 100)
            assert instance is not None
            leases.enter_context(balancer.outstanding(instance, 100))
        loads = sorted(instance.outstanding for instance in balancer.instances)
        assert sum(loads) == 100 * 100
        assert loads[-1] <= 1.25 * sum(loads) / 4 + 100
    assert [instance.outstanding for instance in balancer.instances] == [0] * 4


def test_where_nothing_is_kept_the_least_loaded_instance_serves_whatever_a_ticket_says():
    instances = fleet(3)
    balancer = LoadBalancer(instances, affinity=False)
    for busy in instances:
        for other in instances:
            other.outstanding = 1 if other is busy else 2
        assert {balancer.choose(user, 500, owner="i-0") for user in USERS[:20]} == {busy}
    for instance in instances:
        instance.outstanding = 0
    assert {balancer.choose(user, 500) for user in USERS} == set(instances)  # ties are spread


def test_a_router_that_is_alone_places_new_users_by_load_and_known_ones_as_before():
    instances = fleet(2)
    balancer = LoadBalancer(instances, alone=True, slack_behaviours=1_000)
    first, second = instance_order("ann", instances)
    assert balancer.choose("ann", 500) is first  # nobody has work
    first.outstanding = 1
    assert balancer.choose("ann", 500) is second
    balancer.note_served("ann", second)
    first.outstanding, second.outstanding = 0, 900
    assert balancer.choose("ann", 500) is second  # the prefix is there, and the load is small
    second.outstanding = 90_000
    assert balancer.choose("ann", 500) is first
    second.ready = False
    assert balancer.choose("ann", 500) is first
    several = LoadBalancer(instances, slack_behaviours=1_000)
    several.note_served("ann", second)
    first.outstanding, second.ready = 1, True
    assert several.choose("ann", 500) is first  # routers that are not alone agree by hashing


def test_a_user_of_whom_nothing_is_kept_returns_only_where_loads_are_equal():
    instances = fleet(2)
    balancer = LoadBalancer(instances, alone=True)
    first, second = instance_order("ann", instances)
    balancer.note_served("ann", second, kept=False)
    assert balancer.choose("ann", 500) is second
    second.outstanding = 1
    assert balancer.choose("ann", 500) is first


def test_a_failed_request_is_no_longer_outstanding():
    balancer = LoadBalancer(fleet(1))
    with pytest.raises(RuntimeError), balancer.outstanding(balancer.instances[0], 7):
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
    chosen = LoadBalancer(instances, slack_behaviours=0).choose(user, tokens)
    assert chosen is not None
    bound = 1.25 * (sum(loads) + tokens) / len(loads)
    assert chosen.load + tokens <= bound or chosen.load == min(loads)


def test_long_and_short_requests_keep_apart_while_both_pools_live():
    instances = [
        InstanceState(f"i-{n}", "http://x:1", pool="long" if n < 2 else "short") for n in range(4)
    ]
    balancer = LoadBalancer(instances, long_from=1_000)
    assert {balancer.choose(user, 5_000).pool for user in USERS[:100]} == {"long"}
    assert {balancer.choose(user, 10).pool for user in USERS[:100]} == {"short"}
    for instance in instances[:2]:
        instance.ready = False
    assert {balancer.choose(user, 5_000).pool for user in USERS[:100]} == {"short"}


def test_no_instance_left_is_none():
    balancer = LoadBalancer(fleet(2))
    assert balancer.choose("ann", 1, tried={"i-0", "i-1"}) is None


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


def answered(balancer, name, times=1, **outcome):
    for _ in range(times):
        balancer.note_answer(balancer.by_name[name], **outcome)


def usable(balancer):
    now = balancer.clock.now()
    return [instance.name for instance in balancer.instances if instance.usable(now)]


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        ({"failed": True, "grave": False}, "failing"),
        ({"seconds": 0.4}, "slow"),
    ],
)
def test_an_outlier_is_ejected_and_returns_by_a_trial(outcome, reason):
    balancer = LoadBalancer(fleet(3), clock=FakeClock())
    for name in ("i-1", "i-2"):
        answered(balancer, name, 10, seconds=0.01)
    answered(balancer, "i-0", 10, **outcome)
    assert usable(balancer) == ["i-1", "i-2"] and balancer.ejected == {reason: 1}
    answered(balancer, "i-0", seconds=0.01)  # sent before: it takes nothing back
    for wait in (5.0, 10.0):  # it fails its trial, and the next comes later
        balancer.clock.moment += wait - 0.1
        assert usable(balancer) == ["i-1", "i-2"]
        balancer.clock.moment += 0.1
        answered(balancer, "i-1", 10, seconds=0.01)
        assert usable(balancer) == ["i-0", "i-1", "i-2"]
        with balancer.outstanding(balancer.by_name["i-0"], 1):
            assert usable(balancer) == ["i-1", "i-2"]  # one trial at a time
        answered(balancer, "i-0", **outcome)
    balancer.clock.moment += 20.0
    with balancer.outstanding(balancer.by_name["i-0"], 1):
        answered(balancer, "i-0", seconds=0.01)
    assert usable(balancer) == ["i-0", "i-1", "i-2"]


def test_at_most_half_of_a_pool_is_ejected_for_its_answers():
    balancer = LoadBalancer(fleet(4), clock=FakeClock())
    answered(balancer, "i-3", 10, seconds=0.01)
    for name in ("i-0", "i-1", "i-2"):
        answered(balancer, name, 10, failed=True)
    assert usable(balancer) == ["i-2", "i-3"]
    alone = LoadBalancer(fleet(1), clock=FakeClock())
    answered(alone, "i-0", 10, failed=True)
    assert usable(alone) == ["i-0"]


def test_what_fails_everywhere_ejects_nobody():
    balancer = LoadBalancer(fleet(3), clock=FakeClock())
    for _ in range(20):
        for instance in balancer.instances:
            balancer.note_answer(instance, failed=True, grave=False)
    assert len(usable(balancer)) == 3


def test_failures_now_and_then_count_though_successes_lie_between():
    balancer = LoadBalancer(fleet(2), clock=FakeClock())
    answered(balancer, "i-1", 10)
    for _ in range(5):
        answered(balancer, "i-0", failed=True)
        answered(balancer, "i-0")
    assert usable(balancer) == ["i-1"]


def test_instances_come_and_go_and_only_their_own_users_move():
    users = [f"user-{number}" for number in range(200)]
    balancer = LoadBalancer([InstanceState(f"i-{number}", "") for number in range(3)])
    before = {user: balancer.choose(user, 1) for user in users}
    guest = InstanceState("guest", "")
    balancer.add(guest)
    with_guest = {user: balancer.choose(user, 1) for user in users}
    moved = {user for user in users if with_guest[user] is not before[user]}
    assert moved and {with_guest[user] for user in moved} == {guest}
    guest.leaving = True
    assert {user: balancer.choose(user, 1, owner="guest") for user in users} == before
    balancer.remove(guest)
    assert {user: balancer.choose(user, 1) for user in users} == before
    assert "guest" not in balancer.by_name


def test_without_instances_there_is_no_choice():
    assert LoadBalancer([]).choose("ann", 1) is None


def plainly_chosen(
    balancer: LoadBalancer,
    user: str,
    behaviours: int,
    tried: set[str],
    last: str | None,
    alone: bool,
) -> InstanceState | None:
    """The rule in full: every usable instance ordered, the first that is not overloaded."""
    usable = [each for each in balancer.instances if each.name not in tried and each.usable(0.0)]
    if not usable:
        return None
    order = instance_order(user, usable)
    if not balancer.affinity or (alone and last not in [each.name for each in usable]):
        start = balancer.instances.index(instance_order(user, balancer.instances)[0])
        turned = balancer.instances[start:] + balancer.instances[:start]
        return min((each for each in turned if each in usable), key=lambda each: each.load)
    if alone:
        order.sort(key=lambda each: each.name != last)
    bound = 1.25 * (sum(each.load for each in usable) + behaviours) / len(usable)
    for each in order:
        if each.load + behaviours <= bound or each.load <= balancer.slack_behaviours:
            return each
    return min(usable, key=lambda each: each.load)


LOADS = st.sampled_from([0, 1, 500, 1_024, 1_025, 1_600, 9_000])


@given(
    states=st.lists(st.tuples(LOADS, LOADS, st.booleans(), st.booleans()), min_size=1, max_size=9),
    behaviours=st.sampled_from([1, 600, 3_000]),
    tried=st.sets(st.sampled_from(["i-0", "i-1", "i-5"]), max_size=2),
    last=st.sampled_from([None, "i-0", "i-1", "i-8", "gone"]),
    alone=st.booleans(),
    affinity=st.booleans(),
)
def test_choices_are_those_of_the_rule_in_full(states, behaviours, tried, last, alone, affinity):
    instances = fleet(len(states))
    for each, (outstanding, reported, ready, tripped) in zip(instances, states, strict=True):
        each.outstanding, each.reported, each.ready = outstanding, reported, ready
        if tripped:
            each.breaker.trip(0.0, 5.0)
    balancer = LoadBalancer(instances, alone=alone, affinity=affinity, clock=FakeClock(0.0))
    if last is not None:
        balancer.note_served("ann", InstanceState(last, "http://127.0.0.1:1"))
    expected = plainly_chosen(balancer, "ann", behaviours, tried, last, alone)
    assert balancer.choose("ann", behaviours, tried=tried) is expected


def test_an_instance_that_only_knows_the_history_ranks_where_no_other_has_less_to_do():
    instances = fleet(3)
    balancer = LoadBalancer(instances, alone=True)
    last = instance_order("ann", instances)[-1]
    assert balancer.choose("ann", 500, near=last.name) is last
    last.outstanding = 1
    assert balancer.choose("ann", 500, near=last.name) is not last
    assert balancer.choose("ann", 500, owner=last.name) is last  # it holds the prefix
