"""One flight per key: a prefix is computed, extended or reloaded once, however many requests want
it at the same moment.

    find   ── exact and ready ──▶ a lease (device)          ── on its way ──▶ the flight, to be
           joined
    start  ── the longest usable part, on the device or the host, becomes the flight's past ──▶
    FILLING steps  ── runs on the compute thread, touches nothing but buffers
    land   ── READY for all who joined                     crash ── gone, all who joined are told

A shorter prefix counts only if its digest is that of the same first behaviours: exact or not
reused.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from slipstream.serving.cache.expander import Expander, HostLease
from slipstream.serving.cache.prefix_cache import Busy, Lease, PrefixCache, Slot, State
from slipstream.serving.engine.encoding import EncodedHistory
from slipstream.serving.engine.engine import SUFFIX_ROOM, Engine
from slipstream.serving.engine.prefix import PrefixKey
from slipstream.serving.instance.cost_model import CostModel


class PrefixRequest:
    """A history in the model's terms, with its digests computed when asked for and remembered."""

    def __init__(self, engine: Engine, user: str, encoded: EncodedHistory) -> None:
        self.user, self.encoded = user, encoded
        self.digests: dict[int, bytes] = {}
        self.key = PrefixKey(engine.version, user, len(encoded), self.digest(len(encoded)))

    def digest(self, behaviours: int) -> bytes:
        """Of the first so many behaviours."""
        if behaviours not in self.digests:
            self.digests[behaviours] = self.encoded.digest(behaviours)
        return self.digests[behaviours]


@dataclass(eq=False)
class InflightPrefix:
    """A prefix on its way into a slot. `source` says whence: computed, extended or host."""

    wanted: PrefixRequest
    slot: Slot
    base: Lease | HostLease | None
    source: str
    seconds: float  # predicted
    joined: int = 0
    handle: Any = None  # the instance's job and waiters
    extra: dict[str, Any] = field(default_factory=dict)


class InflightPrefixes:
    """The cache, the expander and what is on its way between them. Owned by one thread, but for
    `steps`.
    """

    def __init__(
        self, engine: Engine, cache: PrefixCache, expander: Expander | None, cost: CostModel
    ) -> None:
        self.engine, self.cache, self.expander, self.cost = engine, cache, expander, cost
        self.flying: dict[PrefixKey, InflightPrefix] = {}
        self.computed = self.extended = self.extended_from_host = self.reloaded = 0

    def find(self, wanted: PrefixRequest) -> Lease | InflightPrefix | None:
        """This very prefix: a lease if it is ready, the flight (counted as joined) if it is on its
        way.
        """
        flight = self.flying.get(wanted.key)
        if flight is not None:
            flight.joined += 1
            return flight
        return self.cache.acquire(wanted.key)

    def shorter(self, wanted: PrefixRequest, max_missing: int) -> Lease | None:
        """The user's longest ready prefix of this history that lacks at most `max_missing`
        behaviours.
        """
        slot = self._shorter_slot(wanted)
        if slot is None or len(wanted.encoded) - slot.key.behaviours > max_missing:
            return None
        return self.cache.acquire(slot.key)

    def shorter_slot(self, wanted: PrefixRequest, max_missing: int) -> Slot | None:
        """The same, only looked at."""
        slot = self._shorter_slot(wanted)
        return (
            slot
            if slot is not None and len(wanted.encoded) - slot.key.behaviours <= max_missing
            else None
        )

    def flying_shorter(self, wanted: PrefixRequest, max_missing: int) -> InflightPrefix | None:
        """A flight of a shorter prefix of this history."""
        for flight in self.flying.values():
            missing = len(wanted.encoded) - flight.wanted.key.behaviours
            same = flight.wanted.user == wanted.user and 0 < missing <= max_missing
            if same and wanted.digest(flight.wanted.key.behaviours) == flight.wanted.key.digest:
                return flight
        return None

    def start(self, wanted: PrefixRequest, room: int = SUFFIX_ROOM) -> InflightPrefix | Busy:
        """Reserves a slot and chooses the cheapest way to fill it."""
        if wanted.key in self.flying:
            return Busy("exists")
        tokens = self.engine.cached_tokens(len(wanted.encoded))
        base, seconds, source = self._cheapest(wanted, tokens)
        slot = self.cache.reserve(wanted.key, tokens + room)
        if isinstance(slot, Busy):
            if base is not None:
                base.release()
            return slot
        flight = InflightPrefix(wanted, slot, base, source, seconds)
        self.flying[wanted.key] = flight
        return flight

    def estimate(self, wanted: PrefixRequest) -> float:
        """Seconds `start` would take."""
        base, seconds, _ = self._cheapest(wanted, self.engine.cached_tokens(len(wanted.encoded)))
        if base is not None:
            base.release()
        return seconds

    def steps(self, flight: InflightPrefix) -> Iterator[int]:
        """The work itself, for the compute thread."""
        past = flight.base
        if (
            isinstance(past, HostLease)
            and self.expander is not None
            and not self.expander.sound(past)
        ):
            flight.source = "damaged"
            past = None
        encoded, base = flight.wanted.encoded, None if past is None else past.prefix
        chunk = self.cost.chunk_for(self.engine.cached_tokens(len(encoded)))
        yield from self.engine.prefill_steps(encoded, flight.slot.buffer, base, chunk)

    def land(self, flight: InflightPrefix, pinned_until: float | None) -> None:
        """Publishes what the steps have filled."""
        from_host = isinstance(flight.base, HostLease)
        self._let_go(flight)
        wanted = flight.wanted
        self.cache.publish(
            flight.slot,
            self.engine.prefix_of(wanted.encoded, flight.slot.buffer, wanted.key.digest),
            pinned_until,
        )
        self.reloaded += flight.source == "host"
        self.extended += flight.source == "extended"
        self.extended_from_host += flight.source == "extended" and from_host
        self.computed += flight.source in ("computed", "damaged")

    def crash(self, flight: InflightPrefix) -> None:
        """The steps failed or were given up: nothing is published."""
        self._let_go(flight)
        if flight.slot.state is State.FILLING:
            self.cache.abandon(flight.slot)

    def _let_go(self, flight: InflightPrefix) -> None:
        self.flying.pop(flight.wanted.key, None)
        if (
            isinstance(flight.base, HostLease)
            and flight.source == "damaged"
            and self.expander is not None
        ):
            self.expander.drop(flight.base)
        elif flight.base is not None:
            flight.base.release()
        flight.base = None

    def _shorter_slot(self, wanted: PrefixRequest) -> Slot | None:
        for slot in self.cache.of_user(wanted.user):
            behaviours = slot.key.behaviours
            if slot.key.version != self.engine.version or behaviours > len(wanted.encoded):
                continue
            if wanted.digest(behaviours) == slot.key.digest:
                return slot
        return None

    def _cheapest(
        self, wanted: PrefixRequest, tokens: int
    ) -> tuple[Lease | HostLease | None, float, str]:
        """What to start from: the longest part on the device or on the host, where copying beats
        computing.
        """
        shape, cost = self.engine.shape, self.cost
        best: Lease | HostLease | None = None
        seconds, source = cost.prefill_seconds(tokens), "computed"
        slot = self._shorter_slot(wanted)
        device = (
            Lease(self.cache, slot)
            if slot is not None and slot.prefix is not None and slot.prefix.tokens
            else None
        )
        host = (
            self.expander.find(wanted.user, wanted.encoded, wanted.digests)
            if self.expander is not None
            else None
        )
        for lease in (device, host):
            if lease is None:
                continue
            past = lease.prefix.tokens
            needed = cost.copy_seconds(shape.nbytes(past)) + cost.prefill_seconds(tokens, past)
            if needed < seconds:
                if best is not None:
                    best.release()
                best, seconds = lease, needed
                source = (
                    "host"
                    if isinstance(lease, HostLease)
                    and lease.prefix.behaviours == len(wanted.encoded)
                    else "extended"
                )
            else:
                lease.release()
        return best, seconds, source
