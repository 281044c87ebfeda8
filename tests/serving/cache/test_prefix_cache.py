"""The device tier's verbs, and a random walk over cache, flights and expander that checks every
promise after every step.
"""

import itertools
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from slipstream.serving.cache.arena import Extents
from slipstream.serving.cache.expander import Expander
from slipstream.serving.cache.inflight import InflightPrefix, InflightPrefixes, PrefixRequest
from slipstream.serving.cache.prefix_cache import Busy, Lease, PrefixCache, State
from slipstream.serving.engine.prefix import Prefix, PrefixKey
from slipstream.serving.instance.cost_model import CostModel
from tests.support.serving_samples import engine, history

COPY_IS_CHEAP = CostModel(np.array([1e-3, 1e-4, 0.0, 0.0]), 1e-12)


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


def test_reserve_publish_acquire_release(small):
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


def test_least_recently_used_leaves_first_and_the_pinned_never(small):
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
    assert cache.lookup(key("a")) is None and cache.of_user("a") == []


def test_extents_merge_and_refuse_a_double_gift():
    extents = Extents(1024)
    a, b, c = (extents.take(256) for _ in range(3))
    extents.give(b, 256)
    assert extents.largest == 256
    extents.give(c, 256)
    assert extents.largest == 768
    with pytest.raises(ValueError):
        extents.give(c, 256)
    extents.give(a, 256)
    assert (extents.largest, extents.used) == (1024, 0)
    assert extents.take_at(512, 100) and not extents.take_at(512, 64) and extents.used == 128


class Walk(RuleBasedStateMachine):
    """Requests of a few users come, wait, finish, fail and go, on a cache and a shelf too small for
    all of them.
    """

    @initialize()
    def begin(self):
        self.folder = tempfile.TemporaryDirectory()
        root = Path(self.folder.name)
        self.engines = [engine(root, dim=8, blocks=1), engine(root, dim=8, blocks=2)]
        self.version = 0
        self.now = 0.0
        self.leases, self.flights_open, self.storing = [], [], []
        self.expander = None
        self._open()

    def _open(self):
        served = self.engines[self.version]
        if self.expander is not None:
            self.expander.close()
        self.cache = PrefixCache(served.shape, served.shape.nbytes(170))
        self.expander = Expander(served, Path(self.folder.name) / "shelf", served.shape.nbytes(150))
        self.flights = InflightPrefixes(served, self.cache, self.expander, COPY_IS_CHEAP)
        self.engine = served

    def wanted(self, user, length, seed):
        return PrefixRequest(self.engine, user, self.engine.encode(history(length, seed=seed)))

    @rule(user=st.sampled_from("ab"), length=st.sampled_from([10, 20, 40]), seed=st.integers(0, 1))
    def request(self, user, length, seed):
        wanted = self.wanted(user, length, seed)
        flying_before = set(self.flights.flying)
        found = self.flights.find(wanted)
        if isinstance(found, Lease):
            assert wanted.key not in flying_before
            self._check(found.prefix, wanted)
            self.leases.append(found)
        elif isinstance(found, InflightPrefix):
            assert wanted.key in flying_before
            assert self.flights.start(wanted) == Busy("exists")  # nobody starts a second one
        else:
            flight = self.flights.start(wanted, room=10)
            if isinstance(flight, InflightPrefix):
                assert wanted.key not in flying_before
                self.flights_open.append(flight)

    @rule(user=st.sampled_from("ab"), length=st.sampled_from([20, 40]), seed=st.integers(0, 1))
    def serve(self, user, length, seed):
        """A request from beginning to end, its lease kept."""
        wanted = self.wanted(user, length, seed)
        found = self.flights.find(wanted)
        if found is None and isinstance(
            flight := self.flights.start(wanted, room=10), InflightPrefix
        ):
            self.flights_open.append(flight)
            self.land(-1, False)
            found = self.flights.find(wanted)
        if isinstance(found, Lease):
            self._check(found.prefix, wanted)
            self.leases.append(found)

    @rule(user=st.sampled_from("ab"), length=st.sampled_from([22, 45]), seed=st.integers(0, 1))
    def extension(self, user, length, seed):
        wanted = self.wanted(user, length, seed)
        lease = self.flights.shorter(wanted, max_missing=5)
        if lease is not None:
            assert length - 5 <= lease.prefix.behaviours <= length
            self._check(lease.prefix, self.wanted(user, lease.prefix.behaviours, seed))
            self.leases.append(lease)

    def _check(self, prefix, wanted):
        assert prefix.version == self.engine.version
        fresh = self.engine.prefill(wanted.encoded)
        assert prefix.tokens == fresh.tokens
        for mine, right in zip(prefix.past(), fresh.past(), strict=True):
            assert torch.equal(mine.k_SHK, right.k_SHK) and torch.equal(mine.v_SHV, right.v_SHV)
            assert torch.equal(mine.timestamps_S, right.timestamps_S)

    @precondition(lambda self: self.flights_open)
    @rule(which=st.integers(0, 9), pinned=st.booleans())
    def land(self, which, pinned):
        flight = self.flights_open.pop(which % len(self.flights_open))
        for _ in self.flights.steps(flight):
            pass
        self.flights.land(flight, self.now + 2 if pinned else None)

    @precondition(lambda self: self.flights_open)
    @rule(which=st.integers(0, 9), steps=st.integers(0, 1))
    def crash(self, which, steps):
        flight = self.flights_open.pop(which % len(self.flights_open))
        for _, _ in zip(range(steps), self.flights.steps(flight), strict=False):
            pass
        self.flights.crash(flight)
        assert self.flights.find(flight.wanted) is None or flight.wanted.key in self.flights.flying

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 9))
    def release(self, which):
        self.leases.pop(which % len(self.leases)).release()

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 9))
    def demote(self, which):
        lease = self.leases[which % len(self.leases)]
        storing = self.expander.begin(lease.slot.key, lease.prefix)
        if storing is not None:
            self.storing.append((storing, Lease(self.cache, lease.slot)))

    @precondition(lambda self: self.storing)
    @rule(finished=st.booleans())
    def end_demotion(self, finished):
        storing, hold = self.storing.pop()
        for _ in storing.steps():
            if not finished:
                break
        (self.expander.finish if finished else self.expander.cancel)(storing)
        hold.release()

    @rule(seconds=st.floats(0, 3))
    def time_passes(self, seconds):
        self.now += seconds
        self.cache.expire(self.now)

    @precondition(lambda self: not self.flights_open and len(self.expander))
    @rule(other_version=st.booleans())
    def restart(self, other_version):
        """The process dies, half-made demotions included; another takes over its shelf, perhaps
        with another model.
        """
        expected = 0 if other_version else len(self.expander)
        self.leases, self.storing = [], []
        self.version ^= other_version
        self._open()
        assert len(self.expander) == expected

    @invariant()
    def promises(self):
        if not hasattr(self, "cache"):
            return
        slots = list(self.cache.slots())
        assert (
            sum(Extents.rounded(slot.nbytes) for slot in slots)
            == self.cache.used
            <= self.cache.budget
        )
        on_shelf = [record.nbytes for record in self.expander.shelf.records.values()] + [
            s.nbytes for s, _ in self.storing
        ]
        assert sum(map(Extents.rounded, on_shelf)) == self.expander.used <= self.expander.budget
        for lease in self.leases:
            assert (
                lease.slot in slots and lease.slot.state is State.READY
            )  # nothing held is evicted
        assert {slot.key for slot in slots if slot.state is State.FILLING} == set(
            self.flights.flying
        )
        assert all(slot.pinned_until is None or slot.pinned_until > self.now for slot in slots)
        spans = sorted((slot.offset, slot.offset + slot.nbytes) for slot in slots)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))

    def teardown(self):
        if not hasattr(self, "cache"):
            return
        for flight in self.flights_open:
            self.flights.crash(flight)
        for storing, hold in self.storing:
            self.expander.cancel(storing)
            hold.release()
        for lease in self.leases:
            lease.release()
        assert all(slot.holders == 0 for slot in self.cache.slots())
        assert not self.expander._holders
        self.expander.close()
        self.folder.cleanup()


TestWalk = Walk.TestCase
TestWalk.settings = settings(
    max_examples=30,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize(
    ("place", "broken"),
    [
        (
            "slipstream.serving.cache.Slot.evictable",
            property(lambda self: self.state is State.READY),
        ),  # evicts what is held
        (
            "slipstream.serving.cache.inflight.PrefixRequest.digest",
            lambda self, behaviours: bytes(16),
        ),  # any history is any other
    ],
)
def test_the_walk_turns_red_when_a_promise_is_broken(monkeypatch, place, broken):
    monkeypatch.setattr(place, broken)
    with pytest.raises((AssertionError, ValueError, KeyError, ExceptionGroup)):
        run_state_machine_as_test(
            Walk, settings=settings(TestWalk.settings, phases=[Phase.generate], max_examples=500)
        )
