"""The instance that served a user last, for a bounded number of users."""

from slipstream.serving.router.placements import Placements


def test_the_last_instance_counts_and_the_oldest_users_are_forgotten():
    placed = Placements(max_users=2)
    for user, instance in (("a", "i-0"), ("b", "i-1"), ("a", "i-1"), ("c", "i-0")):
        placed.note(user, instance)
    assert [placed.get(user) for user in "abc"] == ["i-1", None, "i-0"] and len(placed) == 2
