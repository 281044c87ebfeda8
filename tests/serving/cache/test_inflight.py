"""Prefixes in flight: each is filled once, from the cheapest base, exact or not at all.

A random walk over cache, in-flight prefixes and expander checks every promise after every step.
"""

import functools
import itertools
import tempfile
from pathlib import Path

import numpy as np
import pytest
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
from slipstream.serving.instance.cost_model import CostModel
from tests.support.demoting_process import demote
from tests.support.fake_clock import FakeClock
from tests.support.serving_samples import cut, engine, history, same_tokens

COPY_IS_CHEAP = CostModel(np.array([1e-3, 1e-4, 0.0, 0.0]), 1e-12)
COPY_IS_DEAR = CostModel(np.array([1e-3, 1e-4, 0.0, 0.0]), 1.0)


@functools.cache
def small_engines():
    """Two engines of different versions."""
    with tempfile.TemporaryDirectory() as folder:
        return [engine(Path(folder), dim=8, blocks=blocks) for blocks in (1, 2)]


class Tiers:
    """A cache, an expander and the prefixes in flight between them."""

    def __init__(self, folder, cost=COPY_IS_CHEAP):
        self.engine = small_engines()[0]
        self.cache = PrefixCache(self.engine.shape, 1 << 20)
        self.expander = Expander(self.engine, folder / "shelf", 1 << 20)
        self.inflight = InflightPrefixes(self.engine, self.cache, self.expander, cost)

    def request(self, length, user="u", seed=0):
        return PrefixRequest(self.engine, user, self.engine.encode(prefix_of(length, seed)))

    def fill(self, request):
        """Start a prefix, run its steps and finish it."""
        prefix = self.inflight.start(request)
        for _ in self.inflight.steps(prefix):
            pass
        self.inflight.finish(prefix, None)
        return prefix


def prefix_of(length, seed=0):
    return cut(history(60, seed=seed), 0, length)


def test_a_second_request_waits_for_the_first(tmp_path):
    tiers = Tiers(tmp_path)
    first = tiers.inflight.start(tiers.request(40))
    assert tiers.inflight.find(tiers.request(40)) is first
    assert tiers.inflight.start(tiers.request(40)) == Busy("exists")
    assert tiers.inflight.find(tiers.request(40, user="other")) is None
    assert tiers.inflight.find_shorter(tiers.request(45), max_missing=5) is first
    assert tiers.inflight.find_shorter(tiers.request(46), max_missing=5) is None
    assert tiers.inflight.find_shorter(tiers.request(45, seed=1), max_missing=5) is None


def test_a_failed_prefix_leaves_nothing(tmp_path):
    tiers = Tiers(tmp_path)
    failed = tiers.inflight.start(tiers.request(40))
    next(iter(tiers.inflight.steps(failed)))
    tiers.inflight.fail(failed)
    assert tiers.inflight.find(tiers.request(40)) is None
    assert (tiers.cache.used, tiers.inflight.by_key) == (0, {})


def test_a_longer_history_starts_from_the_shorter_prefix_on_the_device(tmp_path):
    tiers = Tiers(tmp_path)
    tiers.fill(tiers.request(40))
    longer = tiers.fill(tiers.request(50))
    assert (longer.source, tiers.inflight.computed, tiers.inflight.extended) == ("extended", 1, 1)
    assert tiers.fill(tiers.request(50, seed=1)).source == "computed"
    assert all(slot.holders == 0 for slot in tiers.cache.slots())


def test_an_equal_prefix_is_copied_from_the_host(tmp_path):
    tiers = Tiers(tmp_path)
    demote(tiers.expander, "u", prefix_of(40))
    assert tiers.fill(tiers.request(40)).source == "host"
    assert tiers.fill(tiers.request(30)).source == "computed"
    assert tiers.inflight.reloaded == 1


def test_a_base_is_used_only_where_copying_is_cheaper(tmp_path):
    tiers = Tiers(tmp_path, COPY_IS_DEAR)
    demote(tiers.expander, "u", prefix_of(40))
    assert tiers.fill(tiers.request(40)).source == "computed"


def test_a_damaged_base_is_dropped_and_the_prefix_computed(tmp_path):
    tiers = Tiers(tmp_path)
    demote(tiers.expander, "u", prefix_of(40))
    (record,) = tiers.expander.shelf.records.values()
    tiers.expander.shelf.payload(record.offset, record.nbytes)[100] += 1
    record.verified = False  # as after a restart
    assert tiers.fill(tiers.request(40)).source == "damaged"
    assert (tiers.expander.damaged, len(tiers.expander)) == (1, 0)
    with tiers.inflight.find(tiers.request(40)) as lease:
        check_prefix(tiers.engine, lease.prefix, tiers.request(40))


def check_prefix(served, prefix, request):
    """A prefix equals what the engine computes, bit for bit."""
    assert prefix.version == served.version
    fresh = served.prefill(request.encoded)
    assert same_tokens(prefix, fresh)


class Walk(RuleBasedStateMachine):
    """Requests of a few users arrive, finish and fail; cache and shelf are too small for all."""

    @initialize()
    def begin(self):
        self.folder = tempfile.TemporaryDirectory()
        self.engines = small_engines()
        self.version = 0
        self.clock = FakeClock()
        self.leases, self.filling, self.demotions = [], [], []
        self.expander = None
        self._open()

    def _open(self):
        served = self.engines[self.version]
        if self.expander is not None:
            self.expander.close()
        self.cache = PrefixCache(
            served.shape, served.shape.nbytes(170), pin_share=1.0, clock=self.clock
        )
        self.expander = Expander(served, Path(self.folder.name) / "shelf", served.shape.nbytes(150))
        self.inflight = InflightPrefixes(served, self.cache, self.expander, COPY_IS_CHEAP)
        self.engine = served

    def request_for(self, user, length, seed):
        return PrefixRequest(self.engine, user, self.engine.encode(history(length, seed=seed)))

    @rule(user=st.sampled_from("ab"), length=st.sampled_from([10, 20, 40]), seed=st.integers(0, 1))
    def ask(self, user, length, seed):
        request = self.request_for(user, length, seed)
        before = set(self.inflight.by_key)
        found = self.inflight.find(request)
        if isinstance(found, Lease):
            assert request.key not in before
            check_prefix(self.engine, found.prefix, request)
            self.leases.append(found)
        elif isinstance(found, InflightPrefix):
            assert request.key in before
            assert self.inflight.start(request) == Busy("exists")  # nobody starts a second one
        else:
            prefix = self.inflight.start(request)
            if isinstance(prefix, InflightPrefix):
                assert request.key not in before
                self.filling.append(prefix)

    @rule(user=st.sampled_from("ab"), length=st.sampled_from([20, 40]), seed=st.integers(0, 1))
    def serve(self, user, length, seed):
        """Serve a request from beginning to end and keep its lease."""
        request = self.request_for(user, length, seed)
        found = self.inflight.find(request)
        if found is None and isinstance(prefix := self.inflight.start(request), InflightPrefix):
            self.filling.append(prefix)
            self.finish(-1, False)
            found = self.inflight.find(request)
        if isinstance(found, Lease):
            check_prefix(self.engine, found.prefix, request)
            self.leases.append(found)

    @rule(user=st.sampled_from("ab"), length=st.sampled_from([22, 45]), seed=st.integers(0, 1))
    def extension(self, user, length, seed):
        request = self.request_for(user, length, seed)
        lease = self.inflight.acquire_shorter(request, max_missing=5)
        if lease is not None:
            assert length - 5 <= lease.prefix.behaviours <= length
            shorter = self.request_for(user, lease.prefix.behaviours, seed)
            check_prefix(self.engine, lease.prefix, shorter)
            self.leases.append(lease)

    @precondition(lambda self: self.filling)
    @rule(which=st.integers(0, 9), pinned=st.booleans())
    def finish(self, which, pinned):
        prefix = self.filling.pop(which % len(self.filling))
        for _ in self.inflight.steps(prefix):
            pass
        self.inflight.finish(prefix, self.clock.moment + 2 if pinned else None)

    @precondition(lambda self: self.filling)
    @rule(which=st.integers(0, 9), steps=st.integers(0, 1))
    def fail(self, which, steps):
        prefix = self.filling.pop(which % len(self.filling))
        for _, _ in zip(range(steps), self.inflight.steps(prefix), strict=False):
            pass
        self.inflight.fail(prefix)
        assert (
            self.inflight.find(prefix.request) is None or prefix.request.key in self.inflight.by_key
        )

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 9))
    def release(self, which):
        self.leases.pop(which % len(self.leases)).release()

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 9))
    def demote(self, which):
        lease = self.leases[which % len(self.leases)]
        demotion = self.expander.begin(lease.slot.key, lease.prefix)
        if demotion is not None:
            self.demotions.append((demotion, Lease(lease.slot)))

    @precondition(lambda self: self.demotions)
    @rule(finished=st.booleans())
    def end_demotion(self, finished):
        demotion, hold = self.demotions.pop()
        for _ in demotion.steps():
            if not finished:
                break
        (self.expander.finish if finished else self.expander.cancel)(demotion)
        hold.release()

    @rule(seconds=st.floats(0, 3))
    def time_passes(self, seconds):
        self.clock.moment += seconds
        self.cache.expire()

    @precondition(lambda self: not self.filling and len(self.expander))
    @rule(other_version=st.booleans())
    def restart(self, other_version):
        """The process ends; another opens its shelf, perhaps with another model."""
        expected = 0 if other_version else len(self.expander)
        self.leases, self.demotions = [], []
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
            s.nbytes for s, _ in self.demotions
        ]
        assert sum(map(Extents.rounded, on_shelf)) == self.expander.used <= self.expander.budget
        for lease in self.leases:
            assert (
                lease.slot in slots and lease.slot.state is State.READY
            )  # nothing held is evicted
        assert {slot.key for slot in slots if slot.state is State.FILLING} == set(
            self.inflight.by_key
        )
        assert all(
            slot.pinned_until is None or slot.pinned_until > self.clock.moment for slot in slots
        )
        spans = sorted((slot.offset, slot.offset + slot.nbytes) for slot in slots)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))

    def teardown(self):
        if not hasattr(self, "cache"):
            return
        for prefix in self.filling:
            self.inflight.fail(prefix)
        for demotion, hold in self.demotions:
            self.expander.cancel(demotion)
            hold.release()
        for lease in self.leases:
            lease.release()
        assert all(slot.holders == 0 for slot in self.cache.slots())
        assert not self.expander._holders
        self.expander.close()
        self.folder.cleanup()


WALK = settings(
    max_examples=30,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


def test_every_promise_holds_after_every_step_of_a_random_walk():
    run_state_machine_as_test(Walk, settings=WALK)


@pytest.mark.slow
def test_every_promise_holds_after_every_step_of_many_long_walks():
    run_state_machine_as_test(Walk, settings=settings(WALK, max_examples=300))


@pytest.mark.parametrize(
    ("place", "broken"),
    [
        (
            "slipstream.serving.cache.prefix_cache.Slot.evictable",
            property(lambda self: self.state is State.READY),
        ),  # evicts what is held
        (
            "slipstream.serving.cache.inflight.PrefixRequest.digest",
            lambda self, behaviours: bytes(16),
        ),  # any history equals any other
    ],
    ids=["evicts what is held", "equal digests"],
)
def test_the_walk_fails_when_a_promise_is_broken(monkeypatch, place, broken):
    monkeypatch.setattr(place, broken)
    walks = settings(WALK, phases=[Phase.generate], max_examples=500)
    with pytest.raises((AssertionError, ValueError, KeyError, ExceptionGroup)):
        run_state_machine_as_test(Walk, settings=walks)
