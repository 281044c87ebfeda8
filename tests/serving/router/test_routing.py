"""Who serves a user: sticky, balanced, moved as little as possible, and never piled onto one
instance.
"""

import contextlib
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.serving.router.routing import Breaker, Member, Routing, rendezvous

USERS = [f"user-{number}" for number in range(4_000)]


def fleet(count: int, **pool: object) -> list[Member]:
    return [Member(f"i-{number}", f"http://127.0.0.1:{9000 + number}") for number in range(count)]


def owners(routing: Routing) -> dict[str, str]:
    found = {}
    for user in USERS:
        member = routing.choose(user, 1, 0.0)
        assert member is not None
        found[user] = member.name
    return found


def test_a_user_stays_with_an_instance():
    routing = Routing(fleet(8))
    assert owners(routing) == owners(routing)


def test_two_routers_agree_whatever_the_order_of_their_lists():
    assert owners(Routing(fleet(8))) == owners(Routing(fleet(8)[::-1]))


def test_users_are_spread_evenly():
    counts = Counter(owners(Routing(fleet(8))).values())
    assert len(counts) == 8
    assert max(counts.values()) < 1.15 * len(USERS) / 8
    assert min(counts.values()) > 0.85 * len(USERS) / 8


def test_a_ninth_instance_takes_about_a_ninth_and_moves_nobody_else():
    before, after = owners(Routing(fleet(8))), owners(Routing(fleet(9)))
    moved = {user for user in USERS if before[user] != after[user]}
    assert all(after[user] == "i-8" for user in moved)
    assert 0.8 / 9 < len(moved) / len(USERS) < 1.2 / 9


def test_a_lost_instance_moves_only_its_own_users_and_spreads_them():
    before = owners(Routing(fleet(8)))
    smaller = Routing([member for member in fleet(8) if member.name != "i-3"])
    after = owners(smaller)
    assert {user for user in USERS if before[user] != after[user]} == {
        user for user in USERS if before[user] == "i-3"
    }
    takers = Counter(after[user] for user in USERS if before[user] == "i-3")
    assert len(takers) == 7


def test_a_dead_primary_hands_over_to_the_second_in_order():
    members = fleet(5)
    routing = Routing(members)
    for user in USERS[:200]:
        first, second = rendezvous(user, members)[:2]
        first.ready = False
        assert routing.choose(user, 1, 0.0) is second
        first.ready = True
        assert routing.choose(user, 1, 0.0) is first


def test_a_draining_owner_is_left_alone_even_with_a_ticket():
    members = fleet(3)
    routing = Routing(members)
    order = rendezvous("ann", members)
    assert routing.choose("ann", 1, 0.0, owner=order[2].name) is order[2]
    order[2].draining = True
    assert routing.choose("ann", 1, 0.0, owner=order[2].name) is order[0]


def test_a_ticket_for_an_instance_nobody_knows_is_served_in_order():
    routing = Routing(fleet(3))
    assert routing.choose("ann", 1, 0.0, owner="gone") is rendezvous("ann", routing.members)[0]


def test_a_saturated_primary_is_passed_over_and_returns():
    members = fleet(4)
    routing = Routing(members, slack_tokens=0)
    first, second = rendezvous("ann", members)[:2]
    first.reported = 10_000
    assert routing.choose("ann", 100, 0.0) is second
    first.reported = 0
    assert routing.choose("ann", 100, 0.0) is first


def test_a_ticket_holds_against_load():
    members = fleet(4)
    routing = Routing(members, slack_tokens=0)
    owner = rendezvous("ann", members)[0]
    owner.reported = 10_000
    assert routing.choose("ann", 100, 0.0, owner=owner.name) is owner


def test_affinity_does_not_vanish_on_an_idle_fleet():
    members = fleet(4)
    routing = Routing(members, slack_tokens=1_000)
    first = rendezvous("ann", members)[0]
    first.reported = 900  # all the load there is, but little
    assert routing.choose("ann", 500, 0.0) is first


def test_a_burst_on_one_user_spreads_within_the_bound():
    routing = Routing(fleet(4), load_factor=1.25, slack_tokens=0)
    with contextlib.ExitStack() as leases:
        for _ in range(
            100
        ):  # none has answered yet: only counting before sending can see the burst
            member = routing.choose("ann", 100, 0.0)
            assert member is not None
            leases.enter_context(routing.lease(member, 100, 0.0))
        loads = sorted(member.outstanding for member in routing.members)
        assert sum(loads) == 100 * 100
        assert loads[-1] <= 1.25 * sum(loads) / 4 + 100
    assert [member.outstanding for member in routing.members] == [0] * 4


def test_leases_are_returned_when_the_request_fails():
    routing = Routing(fleet(1))
    with pytest.raises(RuntimeError), routing.lease(routing.members[0], 7, 0.0):
        raise RuntimeError
    assert routing.members[0].outstanding == 0


@given(
    loads=st.lists(st.integers(0, 10_000), min_size=1, max_size=6),
    tokens=st.integers(1, 5_000),
    user=st.text(max_size=10),
)
def test_nobody_is_ever_loaded_beyond_the_bound_unless_it_is_the_least_loaded(
    loads: list[int], tokens: int, user: str
):
    members = fleet(len(loads))
    for member, load in zip(members, loads, strict=True):
        member.reported = load
    chosen = Routing(members, slack_tokens=0).choose(user, tokens, 0.0)
    assert chosen is not None
    bound = 1.25 * (sum(loads) + tokens) / len(loads)
    assert chosen.load + tokens <= bound or chosen.load == min(loads)


def test_long_and_short_requests_keep_apart_while_both_pools_live():
    members = [Member(f"i-{n}", "http://x:1", pool="long" if n < 2 else "short") for n in range(4)]
    routing = Routing(members, long_from=1_000)
    assert {routing.choose(user, 5_000, 0.0).pool for user in USERS[:100]} == {"long"}
    assert {routing.choose(user, 10, 0.0).pool for user in USERS[:100]} == {"short"}
    for member in members[:2]:
        member.ready = False
    assert {routing.choose(user, 5_000, 0.0).pool for user in USERS[:100]} == {"short"}


def test_nobody_left_is_said():
    routing = Routing(fleet(2))
    assert routing.choose("ann", 1, 0.0, tried={"i-0", "i-1"}) is None


def test_the_breaker_opens_tries_once_and_closes():
    breaker = Breaker(threshold=3, cooldown=1.0)
    for _ in range(2):
        breaker.failed(0.0)
    assert breaker.allows(0.0)
    breaker.failed(0.0)
    assert not breaker.allows(0.9)
    assert breaker.allows(1.0)
    breaker.passing(1.0)  # the trial is on its way: nobody follows it yet
    assert not breaker.allows(1.5)
    breaker.failed(1.6)
    assert not breaker.allows(2.5)
    assert breaker.allows(2.6)
    breaker.succeeded()
    assert breaker.allows(2.6)


def test_names_must_differ():
    with pytest.raises(ValueError, match="own name"):
        Routing([Member("a", "http://x:1"), Member("a", "http://x:2")])
