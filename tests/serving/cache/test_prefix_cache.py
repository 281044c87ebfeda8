"""The device tier: what is readable, what is evicted first, what is never evicted."""

import pytest

from slipstream.serving.cache.prefix_cache import Busy, PrefixCache, State
from slipstream.serving.engine.prefix import Prefix, PrefixKey
from tests.support.fake_clock import FakeClock
from tests.support.serving_samples import engine, history


def key(user="u", behaviours=10, digest=b"d" * 16):
    return PrefixKey("v", user, behaviours, digest)


def publish(cache, slot, held, until=None):
    prefix = Prefix(slot.key.version, slot.key.behaviours, slot.key.digest, 0, held, slot.buffer)
    cache.publish(slot, prefix, until)


@pytest.fixture
def small(tmp_path):
    served = engine(tmp_path, dim=8, blocks=1)
    nbytes = 4 * served.shape.nbytes(100)
    cache = PrefixCache(served.shape, nbytes, max_pin_seconds=10.0, clock=FakeClock())
    return cache, served.encode(history(3))


def test_an_entry_is_readable_only_between_publish_and_eviction(small):
    cache, held = small
    slot = cache.reserve(key(), 100)
    assert slot.state is State.FILLING
    assert cache.acquire(key()) is None  # half a prefix is not readable
    assert cache.reserve(key(), 100) == Busy("exists")
    publish(cache, slot, held, until=5.0)
    assert not slot.evictable
    with cache.acquire(key()) as lease:
        assert lease.prefix is slot.prefix
        assert slot.pinned_until is None and not slot.evictable
    assert slot.evictable
    lease.release()  # twice is harmless
    assert slot.holders == 0


def test_the_least_recently_used_leaves_first_and_a_pinned_entry_never(small):
    cache, held = small
    slots = {}
    for name in "abcd":
        slots[name] = cache.reserve(key(name), 100)
        publish(cache, slots[name], held, until=9.0 if name == "a" else None)
    cache.acquire(key("b")).release()  # now c is the oldest that may go
    assert not isinstance(cache.reserve(key("e"), 100), Busy)
    assert slots["c"].state is State.GONE
    lease = cache.acquire(key("d"))
    assert not isinstance(cache.reserve(key("f"), 100), Busy)
    assert slots["b"].state is State.GONE
    assert cache.reserve(key("g"), 100) == Busy("cache_full")  # a pinned, d held, e and f filling
    cache.clock.moment = 9.0
    assert cache.expire() == 1 and cache.expired_pins == 1
    assert not isinstance(cache.reserve(key("g"), 100), Busy)
    assert slots["a"].state is State.GONE and slots["d"].state is State.READY
    lease.release()
    assert cache.used <= cache.budget
    assert cache.reserve(key("h"), 10_000) == Busy("larger_than_cache")


def test_a_slot_takes_only_its_own_prefix(small):
    cache, held = small
    slot, other = cache.reserve(key("a"), 10), cache.reserve(key("b"), 10)
    wrong_digest = Prefix("v", 10, b"x" * 16, 0, held, slot.buffer)
    for prefix in (wrong_digest, Prefix("v", 10, b"d" * 16, 0, held, other.buffer)):
        with pytest.raises(ValueError):
            cache.publish(slot, prefix)
    cache.abandon(slot)
    with pytest.raises(ValueError):
        cache.abandon(slot)
    assert list(cache.slots()) == [other] and cache.of_user("a") == []


def test_a_users_entries_are_forgotten_pinned_or_not_but_never_under_a_reader(small):
    cache, held = small
    for name, until in (("a", 9.0), ("b", None)):
        publish(cache, cache.reserve(key(name), 10), held, until=until)
    with cache.acquire(key("a")):
        assert cache.forget("a") == 1
    filling = cache.reserve(key("c"), 10)
    assert (cache.forget("a"), cache.forget("c"), cache.forget("nobody")) == (0, 1, 0)
    assert cache.of_user("a") == [] and len(cache) == 2
    cache.abandon(filling)
    assert cache.forget("c") == 0


def test_nothing_is_evicted_where_it_would_not_make_room(small):
    cache, held = small
    for name in "abcd":
        publish(cache, cache.reserve(key(name), 100), held)
    lease = cache.acquire(key("b"))  # its bytes lie between those of a and of c and d
    assert cache.reserve(key("e"), 300) == Busy("cache_full")
    assert len(cache) == 4 and cache.evictions == 0
    assert not isinstance(cache.reserve(key("e"), 200), Busy)
    lease.release()
    assert cache.used <= cache.budget


def test_pins_end_in_time_and_keep_only_their_share_whatever_is_asked(small):
    cache, held = small
    for name in "abcd":
        publish(cache, cache.reserve(key(name), 100), held, until=600.0)
    pinned = [slot.key.user for slot in cache.slots() if slot.pinned_until is not None]
    assert pinned == ["a", "b", "c"] and cache.refused_pins == 1  # four fifths of the budget
    assert not isinstance(cache.reserve(key("e"), 100), Busy)  # in the place of d
    cache.clock.moment = 9.9
    assert cache.expire() == 0
    cache.clock.moment = 10.0
    assert cache.expire() == 3


def test_a_request_that_was_not_announced_leaves_the_pin(small):
    cache, held = small
    slot = cache.reserve(key(), 100)
    publish(cache, slot, held, until=5.0)
    cache.acquire(key(), keep_pin=True).release()
    assert slot.pinned_until == 5.0
    cache.acquire(key()).release()
    assert slot.pinned_until is None
