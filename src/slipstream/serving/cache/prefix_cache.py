"""The device tier of the prefix cache: entries by key within a byte budget.

    absent ──reserve──▶ FILLING ──publish──▶ READY ──acquire──▶ READY, held ──release──▶ READY
                           │                   │
                           └──abandon──▶ absent└──evicted (least recently used first)──▶ absent

An entry may be evicted only when it is READY, not held and not pinned. A pin ends when
the entry is acquired or its deadline passes. Bytes in use never exceed the budget. A FILLING entry
cannot be read, so no request sees half a prefix. A READY entry never changes, except the room after
it, which the compute thread uses while it ranks. All methods are called from one thread, the
event loop's. Touch this when entries are kept or evicted in another way.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Self

from slipstream.serving.cache.arena import Arena
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
    """An entry of the cache with its memory."""

    def __init__(self, key: PrefixKey, offset: int, buffer: PrefixBuffer) -> None:
        self.key, self.offset, self.buffer = key, offset, buffer
        self.state = State.FILLING
        self.prefix: Prefix | None = None
        self.holders = 0
        self.pinned_until: float | None = None
        self.last_used = 0

    @property
    def nbytes(self) -> int:
        """Bytes of its memory."""
        return self.buffer.nbytes

    @property
    def evictable(self) -> bool:
        """Whether it is READY, not held and not pinned."""
        return self.state is State.READY and self.holders == 0 and self.pinned_until is None


class Lease:
    """The right to read a prefix; it ends with `release` or with the `with` block."""

    def __init__(self, slot: Slot) -> None:
        assert slot.prefix is not None
        self.slot, self.prefix = slot, slot.prefix
        self._held = True
        slot.holders += 1

    def release(self) -> None:
        """End the lease; a second call does nothing."""
        if self._held:
            self._held = False
            self.slot.holders -= 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class PrefixCache:
    """Prefixes by key within a byte budget."""

    def __init__(self, shape: KVShape, budget: int) -> None:
        self.shape, self.arena = shape, Arena(budget)
        self._slots: dict[PrefixKey, Slot] = {}
        self._users: dict[str, set[PrefixKey]] = {}
        self._uses = 0
        self.evictions = self.expired_pins = 0

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
        return sum(slot.nbytes for slot in self._slots.values() if not slot.evictable)

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
            for slot in self._evictable_by_age():
                self._remove(slot)
                self.evictions += 1
                if (offset := self.arena.take(nbytes)) is not None:
                    break
            else:
                return Busy("cache_full")
        slot = Slot(
            key, offset, PrefixBuffer(self.shape, capacity, self.arena.view(offset, nbytes))
        )
        self._slots[key] = slot
        self._users.setdefault(key.user, set()).add(key)
        return slot

    def publish(self, slot: Slot, prefix: Prefix, pinned_until: float | None = None) -> None:
        """Make a FILLING entry READY; with `pinned_until`, pin it until that time."""
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
        slot.prefix, slot.state, slot.pinned_until = prefix, State.READY, pinned_until
        self._touch(slot)

    def abandon(self, slot: Slot) -> None:
        """Remove a FILLING entry."""
        if slot.state is not State.FILLING:
            raise ValueError("only a filling slot can be abandoned")
        self._remove(slot)

    def acquire(self, key: PrefixKey) -> Lease | None:
        """Lease a READY entry and end its pin; None where there is no such entry."""
        slot = self._slots.get(key)
        if slot is None or slot.state is not State.READY:
            return None
        slot.pinned_until = None
        self._touch(slot)
        return Lease(slot)

    def pin(self, slot: Slot, until: float) -> None:
        """Keep a READY entry for an announced request until that time."""
        if slot.state is not State.READY:
            raise ValueError("only a ready entry can be pinned")
        slot.pinned_until = until if slot.pinned_until is None else max(until, slot.pinned_until)
        self._touch(slot)

    def expire(self, now: float) -> int:
        """End the pins whose deadline has passed (the request never came); return their number."""
        late = [
            slot
            for slot in self._slots.values()
            if slot.pinned_until is not None and slot.pinned_until <= now
        ]
        for slot in late:
            slot.pinned_until = None
        self.expired_pins += len(late)
        return len(late)

    def forget(self, user: str) -> int:
        """Remove a user's entries, pinned ones too; return how many are still filling or held."""
        slots = [self._slots[key] for key in self._users.get(user, ())]
        for slot in slots:
            slot.pinned_until = None
            if slot.evictable:
                self._remove(slot)
        return sum(slot.state is not State.GONE for slot in slots)

    def slots(self) -> Iterator[Slot]:
        """Iterate over all entries."""
        return iter(tuple(self._slots.values()))

    def _evictable_by_age(self) -> list[Slot]:
        return sorted(
            (slot for slot in self._slots.values() if slot.evictable),
            key=lambda slot: slot.last_used,
        )

    def _touch(self, slot: Slot) -> None:
        self._uses += 1
        slot.last_used = self._uses

    def _remove(self, slot: Slot) -> None:
        del self._slots[slot.key]
        keys = self._users[slot.key.user]
        keys.discard(slot.key)
        if not keys:
            del self._users[slot.key.user]
        self.arena.give(slot.offset, slot.nbytes)
        slot.state = State.GONE
