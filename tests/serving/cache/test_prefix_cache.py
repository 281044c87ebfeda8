"""The device tier: what is readable, what is evicted first, what is never evicted."""

import pytest

from slipstream.serving.cache.prefix_cache import Busy, PrefixCache, State
from slipstream.serving.engine.prefix import Prefix, PrefixKey
from tests.support.serving_samples import engine, history


def key(user="u", behaviours=10, digest=b"d" * 16):
    return PrefixKey("v", user, behaviours, digest)


def publish(cache, slot, held, until=None):
    prefix = Prefix(slot.key.version, slot.key.behaviours, slot.key.digest, 0, held, slot.buffer)
    cache.publish(slot, prefix, until)


@pytest.fixture
def small(tmp_path):
    served = engine(tmp_path, dim=8, blocks=1)
    cache = PrefixCache(served.shape, 4 * served.shape.nbytes(100))
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
    assert cache.expire(9.0) == 1 and cache.expired_pins == 1
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
