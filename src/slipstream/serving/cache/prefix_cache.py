"""The device tier of the prefix cache: entries by key within a byte budget.

    absent ──reserve──▶ FILLING ──publish──▶ READY ──acquire──▶ READY, held ──release──▶ READY
                           │                   │
                           └──abandon──▶ absent└──evicted (least recently used first)──▶ absent

An entry may be evicted only when it is READY, not held and not pinned. A pin ends when the entry is
acquired or its deadline passes. It lasts no longer than `max_pin_seconds`, and pins keep no more
than a share of the budget, whatever callers ask for. Bytes in use never exceed the budget. A
FILLING entry cannot be read, so no request sees half a prefix. A READY entry never changes, except
the room after it, which the compute thread uses while it ranks. All methods are called from one
thread, the event loop's. Touch this when entries are kept or evicted in another way.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Self

from slipstream.serving.cache.arena import Arena
from slipstream.serving.clock import SYSTEM_CLOCK, Clock
from slipstream.serving.engine.prefix import KVShape, Prefix, PrefixBuffer, PrefixKey


class State(Enum):
    """The state of an entry."""

    FILLING = "filling"
    READY = "ready"
    GONE = "gone"


@dataclass(frozen=True)
class Busy:
    """The reason why nothing could be reserved: one word, counted in the metrics."""

    reason: str


class Slot:
    """An entry of the cache with its memory. `kept` are the cache's entries that must stay."""

    def __init__(
        self, key: PrefixKey, offset: int, buffer: PrefixBuffer, kept: "set[Slot]"
    ) -> None:
        self.key, self.offset, self.buffer = key, offset, buffer
        self.state = State.FILLING
        self.prefix: Prefix | None = None
        self.holders = 0
        self.pinned_until: float | None = None
        self._kept = kept
        kept.add(self)

    @property
    def nbytes(self) -> int:
        """Bytes of its memory."""
        return self.buffer.nbytes

    @property
    def evictable(self) -> bool:
        """Whether it is READY, not held and not pinned."""
        return self.state is State.READY and self.holders == 0 and self.pinned_until is None

    def become(self, state: State) -> None:
        """Change its state."""
        self.state = state
        self._settle()

    def hold(self, more: int) -> None:
        """Count one holder more or less."""
        self.holders += more
        self._settle()

    def pin(self, until: float | None) -> None:
        """Pin it until a moment; None ends its pin."""
        self.pinned_until = until
        self._settle()

    def _settle(self) -> None:
        if self.evictable or self.state is State.GONE:
            self._kept.discard(self)
        else:
            self._kept.add(self)


class Lease:
    """The right to read a prefix; it ends with `release` or with the `with` block."""

    def __init__(self, slot: Slot) -> None:
        assert slot.prefix is not None
        self.slot, self.prefix = slot, slot.prefix
        self._held = True
        slot.hold(1)

    def release(self) -> None:
        """End the lease; a second call does nothing."""
        if self._held:
            self._held = False
            self.slot.hold(-1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class PrefixCache:
    """Prefixes by key within a byte budget."""

    def __init__(
        self,
        shape: KVShape,
        budget: int,
        *,
        pin_share: float = 0.8,
        max_pin_seconds: float = 5.0,
        clock: Clock = SYSTEM_CLOCK,
        arena: Arena | None = None,
    ) -> None:
        self.shape, self.arena, self.clock = shape, arena or Arena(budget), clock
        self.pin_share, self.max_pin_seconds = pin_share, max_pin_seconds
        # The entry used least recently is the first.
        self._slots: OrderedDict[PrefixKey, Slot] = OrderedDict()
        self._kept: set[Slot] = set()  # those that cannot be evicted now
        self._users: dict[str, set[PrefixKey]] = {}
        self.evictions = self.expired_pins = self.refused_pins = 0
        self.on_evicted: Callable[[PrefixKey], None] = lambda key: None  # told what has left

    @property
    def budget(self) -> int:
        """Bytes the entries may use together."""
        return self.arena.nbytes

    @property
    def used(self) -> int:
        """Bytes owned by entries, filling ones included."""
        return self.arena.used

    @property
    def pinned(self) -> int:
        """Bytes that cannot be evicted now."""
        return sum(slot.nbytes for slot in self._kept)

    def __len__(self) -> int:
        return len(self._slots)

    def of_user(self, user: str) -> list[Slot]:
        """The READY entries of a user, the longest history first."""
        found = [self._slots[key] for key in self._users.get(user, ())]
        return sorted(
            (slot for slot in found if slot.state is State.READY),
            key=lambda slot: -slot.key.behaviours,
        )

    def reserve(self, key: PrefixKey, capacity: int) -> Slot | Busy:
        """Make a FILLING entry for `capacity` tokens; evict the least recently used if needed."""
        if key in self._slots:
            return Busy("exists")
        nbytes = self.shape.nbytes(capacity)
        if nbytes > self.budget:
            return Busy("larger_than_cache")
        offset = self.arena.take(nbytes)
        if offset is None:
            pieces = ((slot.offset, slot.nbytes) for slot in self._evictable_by_age())
            if not self.arena.fits_after(nbytes, pieces):
                return Busy("cache_full")
            while offset is None:
                oldest = next(self._evictable_by_age())
                self._remove(oldest)
                self.evictions += 1
                self.on_evicted(oldest.key)
                offset = self.arena.take(nbytes)
        memory = self.arena.view(offset, nbytes)
        slot = Slot(key, offset, self.shape.buffer(capacity, memory), self._kept)
        self._slots[key] = slot
        self._users.setdefault(key.user, set()).add(key)
        return slot

    def publish(self, slot: Slot, prefix: Prefix, pinned_until: float | None = None) -> None:
        """Make a FILLING entry READY; with `pinned_until`, pin it (see `pin`)."""
        if slot.state is not State.FILLING or prefix.buffer is not slot.buffer:
            raise ValueError(
                "only a filling slot can be published, with the prefix written into it"
            )
        if (prefix.version, prefix.behaviours, prefix.digest) != (
            slot.key.version,
            slot.key.behaviours,
            slot.key.digest,
        ):
            raise ValueError("the prefix is not the one the slot was reserved for")
        slot.prefix = prefix
        slot.become(State.READY)
        self._slots.move_to_end(slot.key)
        if pinned_until is not None:
            self.pin(slot, pinned_until)

    def abandon(self, slot: Slot) -> None:
        """Remove a FILLING entry."""
        if slot.state is not State.FILLING:
            raise ValueError("only a filling slot can be abandoned")
        self._remove(slot)

    def acquire(self, key: PrefixKey, *, keep_pin: bool = False) -> Lease | None:
        """Lease a READY entry and end its pin; None where there is no such entry.

        `keep_pin` is for a request that is not the one the entry is pinned for.
        """
        slot = self._slots.get(key)
        if slot is None or slot.state is not State.READY:
            return None
        if not keep_pin:
            slot.pin(None)
        self._slots.move_to_end(key)
        return Lease(slot)

    def has(self, key: PrefixKey) -> bool:
        """Whether there is an entry, READY or not."""
        return key in self._slots

    def lease(self, key: PrefixKey) -> Lease | None:
        """Lease a READY entry without using it: its age and its pin stay; None: no such entry."""
        slot = self._slots.get(key)
        return Lease(slot) if slot is not None and slot.state is State.READY else None

    def pin(self, slot: Slot, until: float) -> bool:
        """Keep a READY entry for an announced request until that time, or the longest allowed.

        False where pins keep their share of the budget already: then the entry may be evicted.
        """
        if slot.state is not State.READY:
            raise ValueError("only a ready entry can be pinned")
        self._slots.move_to_end(slot.key)
        others = sum(
            other.nbytes
            for other in self._kept
            if other is not slot and other.pinned_until is not None
        )
        if others + slot.nbytes > self.pin_share * self.budget:
            self.refused_pins += 1
            return False
        until = min(until, self.clock.now() + self.max_pin_seconds)
        slot.pin(until if slot.pinned_until is None else max(until, slot.pinned_until))
        return True

    def expire(self) -> int:
        """End the pins whose deadline has passed (the request never came); return their number."""
        now = self.clock.now()
        late = [
            slot
            for slot in self._kept
            if slot.pinned_until is not None and slot.pinned_until <= now
        ]
        for slot in late:
            slot.pin(None)
        self.expired_pins += len(late)
        return len(late)

    def forget(self, user: str) -> int:
        """Remove a user's entries, pinned ones too; return how many are still filling or held."""
        slots = [self._slots[key] for key in self._users.get(user, ())]
        for slot in slots:
            slot.pin(None)
            if slot.evictable:
                self._remove(slot)
        return sum(slot.state is not State.GONE for slot in slots)

    def slots(self) -> Iterator[Slot]:
        """Iterate over all entries."""
        return iter(tuple(self._slots.values()))

    def _evictable_by_age(self) -> Iterator[Slot]:
        return (slot for slot in self._slots.values() if slot.evictable)

    def _remove(self, slot: Slot) -> None:
        del self._slots[slot.key]
        keys = self._users[slot.key.user]
        keys.discard(slot.key)
        if not keys:
            del self._users[slot.key.user]
        self.arena.give(slot.offset, slot.nbytes)
        slot.become(State.GONE)
