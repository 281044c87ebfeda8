"""Which version serves a user: by a hash, sticky, and where a change leads."""

from slipstream.serving.versions import VersionRecord, user_place

USERS = [f"user {number}" for number in range(2_000)]


def test_shares_are_kept_and_grow_without_moving_anybody_back():
    stable = VersionRecord("a")
    few, many = stable.with_version("b", 0.05, 0.0), stable.with_version("b", 0.3, 0.0)
    early = {user for user in USERS if few.version_of(user) == "b"}
    late = {user for user in USERS if many.version_of(user) == "b"}
    assert early < late and 60 < len(early) < 140 and 500 < len(late) < 700
    assert few.version_of(None) == "a"
    assert all(0 <= user_place(user) < 1 for user in USERS)


def test_shadows_are_other_users_than_the_candidates():
    record = VersionRecord("a").with_version("b", 0.5, 0.5)
    both = sum(record.shadows(user) and record.version_of(user) == "b" for user in USERS)
    assert 400 < both < 600, "the two choices are independent"
    assert not any(VersionRecord("a", shadow=1.0).shadows(user) for user in USERS)


def test_a_full_share_makes_a_version_stable_and_a_rollback_leads_back():
    first = VersionRecord("a")
    second = first.with_version("b", 1.0, 0.0)
    assert (second.stable, second.candidate, second.previous) == ("b", None, "a")
    assert second.kept_versions == {"a", "b"} and second.open_versions == {"b"}
    canary = second.with_version("c", 0.1, 0.2)
    assert canary.open_versions == {"b", "c"} and canary.kept_versions == {"a", "b", "c"}
    dropped = canary.rolled_back()
    assert (dropped.stable, dropped.candidate, dropped.previous) == ("b", None, "a")
    back = dropped.rolled_back()
    assert (back.stable, back.previous) == ("a", "b")
    assert first.rolled_back() is None
    numbers = [record.number for record in (first, second, canary, dropped, back)]
    assert numbers == [0, 1, 2, 3, 4]


def test_the_stable_version_again_is_no_change_and_drops_a_candidate():
    record = VersionRecord("a")
    assert record.with_version("a", 1.0, 0.0) is record
    assert record.with_version("b", 0.1, 0.0).with_version("a", 1.0, 0.0).candidate is None
