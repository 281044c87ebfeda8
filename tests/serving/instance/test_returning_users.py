"""The share of requests whose user was here before, and could still have a prefix."""

import pytest

from slipstream.serving.instance.returning_users import FIRST_SHARE, ReturningUsers


def test_the_share_follows_who_comes_back():
    users = ReturningUsers(room=1_000_000)
    assert users.share == FIRST_SHARE
    for number in range(2_000):
        users.note(f"u{number}", 10)
    assert users.share < 0.02
    for number in range(2_000):
        users.note(f"u{number}", 10)
    assert users.share > 0.95


def test_users_are_remembered_as_long_as_their_prefixes_would_fit():
    users = ReturningUsers(room=100)
    for _ in range(3_000):  # eleven users take turns where ten prefixes fit: nobody returns in time
        for user in range(11):
            users.note(str(user), 10)
    assert users.share == pytest.approx(0.0, abs=0.01)
    for _ in range(300):
        for user in range(10):
            users.note(str(user), 10)
    assert users.share > 0.95
    users.forget("0")
    before = users.share
    users.note("0", 10)
    assert users.share < before
