"""The instance that served a user last, for a bounded number of users."""

from slipstream.serving.router.placements import Placements, UserPlacement


def test_the_last_instance_counts_and_the_oldest_users_are_forgotten():
    placed = Placements(max_users=2)
    for user, instance in (("a", "i-0"), ("b", "i-1"), ("a", "i-1"), ("c", "i-0")):
        placed.note(user, instance)
    assert [placed.get(user) for user in "abc"] == [
        UserPlacement("i-1", True),
        None,
        UserPlacement("i-0", True),
    ]
    assert len(placed) == 2


def test_who_kept_nothing_replaces_nobody_who_did():
    placed = Placements()
    placed.note("a", "i-0", kept=False)
    assert placed.get("a") == UserPlacement("i-0", False)
    placed.note("a", "i-1")
    placed.note("a", "i-0", kept=False)
    assert placed.get("a") == UserPlacement("i-1", True)
    placed.note("a", "i-1", kept=False)  # the same one has given it up
    assert placed.get("a") == UserPlacement("i-1", False)
