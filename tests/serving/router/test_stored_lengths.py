"""Lengths of stored histories: the last one told counts, and the oldest users are forgotten."""

from slipstream.serving.router.stored_lengths import StoredLengths


def test_the_last_length_counts_and_the_map_is_bounded():
    lengths = StoredLengths(max_users=2)
    assert lengths.get("a", 512) == 512
    for user, behaviours in (("a", 10), ("b", 20), ("a", 11), ("c", 30)):
        lengths.note(user, behaviours)
    assert [lengths.get(user, 512) for user in "abc"] == [11, 512, 30]
    lengths.note("a", 0)  # deleted
    assert lengths.get("a", 512) == 512 and len(lengths) == 1
