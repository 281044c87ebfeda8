"""Rendezvous hashing: the same order everywhere, even, and stable when nodes come and go."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from slipstream.serving.router.hashing import rendezvous_first, rendezvous_order, seed_of

USERS = [f"user-{number}" for number in range(4_000)]
NODES = [f"i-{number}" for number in range(8)]


def owners(nodes: list[str]) -> dict[str, str]:
    """The first node of every user."""
    return {user: rendezvous_order(user, nodes, seed_of)[0] for user in USERS}


def test_the_order_depends_on_names_alone():
    for user in USERS[:100]:
        order = rendezvous_order(user, NODES, seed_of)
        assert sorted(order) == NODES
        assert order == rendezvous_order(user, NODES[::-1], seed_of)
        assert order[0] == rendezvous_first(user, NODES, seed_of)


def test_the_order_is_the_same_in_every_process_and_release():
    """Routers of two releases run at the same time during an upgrade, and must agree."""
    assert rendezvous_order("ann", NODES[:4], seed_of) == ["i-2", "i-0", "i-1", "i-3"]
    assert rendezvous_order("bob", NODES[:4], seed_of) == ["i-1", "i-2", "i-3", "i-0"]


def test_users_are_spread_evenly():
    counts = Counter(owners(NODES).values())
    assert len(counts) == 8
    assert max(counts.values()) < 1.15 * len(USERS) / 8
    assert min(counts.values()) > 0.85 * len(USERS) / 8


def test_a_ninth_node_takes_about_a_ninth_of_the_users_and_no_other_user_changes():
    before, after = owners(NODES), owners([*NODES, "i-8"])
    changed = [user for user in USERS if before[user] != after[user]]
    assert all(after[user] == "i-8" for user in changed)
    assert 0.8 / 9 < len(changed) / len(USERS) < 1.2 / 9


def test_the_users_of_a_lost_node_spread_over_all_others():
    before, after = owners(NODES), owners([name for name in NODES if name != "i-3"])
    changed = {user for user in USERS if before[user] != after[user]}
    assert changed == {user for user in USERS if before[user] == "i-3"}
    assert len({after[user] for user in changed}) == 7


@given(st.text(max_size=20))
def test_any_text_is_a_user(user: str):
    assert sorted(rendezvous_order(user, NODES, seed_of)) == NODES
