"""Prefixes in flight: each is computed, extended or reloaded once, however many requests need it.

    find    exact and READY ──▶ a lease          being filled ──▶ the InflightPrefix to wait for
    start   reserves a slot; the longest usable part, on the device or the host, is its base
    steps   fill the slot; they run on the compute thread and touch nothing but buffers
    finish  READY for every request that waits   fail ──▶ the slot is removed

A shorter prefix is used only if its digest equals that of the same first behaviours: a prefix is
exact or it is not reused. Touch this when the base of a prefix is chosen in another way.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from slipstream.serving.cache.expander import Expander, HostLease
from slipstream.serving.cache.prefix_cache import Busy, Lease, PrefixCache, Slot, State
from slipstream.serving.engine.encoding import EncodedHistory
from slipstream.serving.engine.engine import Engine
from slipstream.serving.engine.prefix import PrefixKey
from slipstream.serving.instance.cost_model import CostModel


class PrefixRequest:
    """An encoded history whose prefix a request needs; digests are computed once, when needed."""

    def __init__(self, engine: Engine, user: str, encoded: EncodedHistory) -> None:
        self.user, self.encoded = user, encoded
        self.digests: dict[int, bytes] = {}
        self.key = PrefixKey(engine.version, user, len(encoded), self.digest(len(encoded)))

    def digest(self, behaviours: int) -> bytes:
        """The digest of the first `behaviours` behaviours."""
        if behaviours not in self.digests:
            self.digests[behaviours] = self.encoded.digest(behaviours)
        return self.digests[behaviours]


@dataclass(eq=False)
class InflightPrefix:
    """A prefix that is being filled. `source` is computed, extended, host or damaged."""

    request: PrefixRequest
    slot: Slot
    base: Lease | HostLease | None
    source: str
    seconds: float  # predicted
    # Set by the instance that runs the steps:
    job: Any = None
    kind: Any = None  # of the job
    done: Any = None  # a future; its result is the error, or None
    pinned_until: float | None = None


class FillEstimate(NamedTuple):
    """What filling a prefix would take: predicted seconds, and its source."""

    seconds: float
    source: str


class InflightPrefixes:
    """The prefixes being filled, between the cache and the expander.

    All methods are called from one thread, except `steps`.
    """

    def __init__(
        self, engine: Engine, cache: PrefixCache, expander: Expander | None, cost: CostModel
    ) -> None:
        self.engine, self.cache, self.expander, self.cost = engine, cache, expander, cost
        self.by_key: dict[PrefixKey, InflightPrefix] = {}
        self.computed = self.extended = self.extended_from_host = self.reloaded = 0

    def find(self, request: PrefixRequest) -> Lease | InflightPrefix | None:
        """Find exactly this prefix: a lease if READY, an `InflightPrefix` if it is being filled."""
        return self.by_key.get(request.key) or self.cache.acquire(request.key)

    def find_shorter_slot(self, request: PrefixRequest, max_missing: int) -> Slot | None:
        """Find the user's longest READY prefix that lacks at most `max_missing` behaviours."""
        slot = self._longest_slot(request)
        if slot is None or len(request.encoded) - slot.key.behaviours > max_missing:
            return None
        return slot

    def acquire_shorter(self, request: PrefixRequest, max_missing: int) -> Lease | None:
        """Lease what `find_shorter_slot` finds."""
        slot = self.find_shorter_slot(request, max_missing)
        return None if slot is None else self.cache.acquire(slot.key)

    def find_shorter(self, request: PrefixRequest, max_missing: int) -> InflightPrefix | None:
        """Find a shorter prefix of this history that is being filled."""
        for inflight in self.by_key.values():
            key = inflight.request.key
            missing = len(request.encoded) - key.behaviours
            same_user = inflight.request.user == request.user
            if not same_user or not 0 < missing <= max_missing:
                continue
            if request.digest(key.behaviours) == key.digest:
                return inflight
        return None

    def start(self, request: PrefixRequest) -> InflightPrefix | Busy:
        """Reserve a slot and choose the cheapest base to fill it from."""
        if request.key in self.by_key:
            return Busy("exists")
        tokens = self.engine.cached_tokens(len(request.encoded))
        base, seconds, source = self._choose_base(request, tokens)
        slot = self.cache.reserve(request.key, tokens)
        if isinstance(slot, Busy):
            if base is not None:
                base.release()
            return slot
        inflight = InflightPrefix(request, slot, base, source, seconds)
        self.by_key[request.key] = inflight
        return inflight

    def estimate(self, request: PrefixRequest) -> FillEstimate:
        """Predict the steps that `start` would begin."""
        tokens = self.engine.cached_tokens(len(request.encoded))
        base, seconds, source = self._choose_base(request, tokens)
        if base is not None:
            base.release()
        return FillEstimate(seconds, source)

    def steps(self, inflight: InflightPrefix) -> Iterator[int]:
        """Fill the slot, for the compute thread; yield after each step."""
        base = inflight.base
        if isinstance(base, HostLease) and not base.verify():
            inflight.source = "damaged"
            base = None
        encoded, past = inflight.request.encoded, None if base is None else base.prefix
        chunk = self.cost.chunk_for(self.engine.cached_tokens(len(encoded)))
        yield from self.engine.prefill_steps(encoded, inflight.slot.buffer, past, chunk)

    def finish(self, inflight: InflightPrefix, pinned_until: float | None) -> None:
        """Publish the prefix that the steps have filled."""
        from_host = isinstance(inflight.base, HostLease)
        self._remove(inflight)
        request, slot = inflight.request, inflight.slot
        prefix = self.engine.prefix_of(request.encoded, slot.buffer, request.key.digest)
        self.cache.publish(slot, prefix, pinned_until)
        self.reloaded += inflight.source == "host"
        self.extended += inflight.source == "extended"
        self.extended_from_host += inflight.source == "extended" and from_host
        self.computed += inflight.source in ("computed", "damaged")

    def fail(self, inflight: InflightPrefix) -> None:
        """Remove a prefix whose steps failed or were cancelled; nothing is published."""
        self._remove(inflight)
        if inflight.slot.state is State.FILLING:
            self.cache.abandon(inflight.slot)

    def _remove(self, inflight: InflightPrefix) -> None:
        self.by_key.pop(inflight.request.key, None)
        base, inflight.base = inflight.base, None
        if isinstance(base, HostLease) and inflight.source == "damaged":
            base.drop()
        elif base is not None:
            base.release()

    def _longest_slot(self, request: PrefixRequest) -> Slot | None:
        for slot in self.cache.of_user(request.user):
            behaviours = slot.key.behaviours
            if slot.key.version != self.engine.version or behaviours > len(request.encoded):
                continue
            if request.digest(behaviours) == slot.key.digest:
                return slot
        return None

    def _choose_base(
        self, request: PrefixRequest, tokens: int
    ) -> tuple[Lease | HostLease | None, float, str]:
        """The longest part on the device or the host, where a copy is cheaper than computing."""
        slot = self._longest_slot(request)
        device = host = None
        if slot is not None and slot.prefix is not None and slot.prefix.tokens:
            device = Lease(slot)
        if self.expander is not None:
            host = self.expander.find(request.user, request.encoded, request.digests)
        best: Lease | HostLease | None = None
        seconds, source = self.cost.prefill_seconds(tokens), "computed"
        for lease in (device, host):
            if lease is None:
                continue
            past = lease.prefix.tokens
            needed = self.cost.copy_seconds(self.engine.shape.nbytes(past))
            needed += self.cost.prefill_seconds(tokens, past)
            if needed >= seconds:
                lease.release()
                continue
            if best is not None:
                best.release()
            best, seconds = lease, needed
            whole = lease.prefix.behaviours == len(request.encoded)
            source = "host" if whole and isinstance(lease, HostLease) else "extended"
        return best, seconds, source
