"""The limits of a server: keys it accepts, rates it lets pass, and how much it remembers."""

import pytest

from slipstream.errors import SlipstreamError
from slipstream.serving.http.limits import MAX_CALLERS, Keys, Limits, RateLimit


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_key_is_accepted_by_its_number_and_nothing_else_is():
    keys = Keys(("the first key of all", "the second key of all"))
    assert keys.accept(b"the second key of all") == 1
    assert keys.accept(b"the first key of all") == 0
    assert [
        keys.accept(offered)
        for offered in (None, b"", b"the first key of al", "schlüssel".encode())
    ] == [None] * 4


def test_short_keys_are_refused():
    with pytest.raises(SlipstreamError, match="at least 16"):
        Keys(("short",))


def test_a_bucket_lets_a_burst_pass_then_the_rate():
    clock = Clock()
    rate = RateLimit(Limits(requests_per_second=10.0, burst=5), clock)
    assert [rate.take("ann") == 0 for _ in range(7)] == [True] * 5 + [False] * 2
    assert 0 < rate.take("ann") <= 0.1
    assert rate.take("bob") == 0
    clock.now += 0.25
    assert [rate.take("ann") == 0 for _ in range(4)] == [True, True, False, False]


def test_remembered_callers_are_bounded():
    rate = RateLimit(Limits(requests_per_second=1.0, burst=1), Clock())
    for caller in range(MAX_CALLERS + 50):
        rate.take(caller)
    assert len(rate._buckets) == MAX_CALLERS
