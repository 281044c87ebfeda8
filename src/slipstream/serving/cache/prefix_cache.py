"""The prefix cache of the device tier: a byte budget, and verbs that say what must hold before and
after.

    absent ──reserve──▶ FILLING ──publish──▶ READY ──acquire──▶ READY, held ──release──▶ READY
    ──(LRU)──▶ absent
                           │                   │ pinned until consumed or its deadline; only an
                                               entry that is
                           └──abandon──▶ absent  neither pinned nor held may be evicted

Bytes in use never exceed the budget. A FILLING entry cannot be read, so nobody sees half a prefix;
a READY one never changes but for the room behind it, which the one compute thread uses while it
ranks. All verbs belong to one thread, the event loop's.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Self

from slipstream.serving.cache.arena import Arena
from slipstream.serving.engine.prefix import KVShape, Prefix, PrefixBuffer, PrefixKey


class State(Enum):
    """Where an entry stands."""

    FILLING = "filling"
    READY = "ready"
    GONE = "gone"


@dataclass(frozen=True)
class Busy:
    """Why nothing could be reserved, as one counted word."""

    reason: str


class Slot:
    """An entry of the cache and the memory it owns."""

    def __init__(self, key: PrefixKey, offset: int, buffer: PrefixBuffer) -> None:
        self.key, self.offset, self.buffer = key, offset, buffer
        self.state = State.FILLING
        self.prefix: Prefix | None = None
        self.holders = 0
        self.pinned_until: float | None = None
        self.last_used = 0

    @property
    def nbytes(self) -> int:
        return self.buffer.nbytes

    @property
    def evictable(self) -> bool:
        return self.state is State.READY and self.holders == 0 and self.pinned_until is None


class Lease:
    """The right to read a prefix; ends with `release`, or with the `with` block, also on error."""

    def __init__(self, cache: "PrefixCache", slot: Slot) -> None:
        assert slot.prefix is not None
        self._cache, self.slot, self.prefix = cache, slot, slot.prefix
        self._held = True
        slot.holders += 1

    def release(self) -> None:
        """Once; a second call does nothing."""
        if self._held:
            self._held = False
            self.slot.holders -= 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class PrefixCache:
    """Prefixes by key, within a budget."""

    def __init__(self, shape: KVShape, budget: int) -> None:
        self.shape, self.arena = shape, Arena(budget)
        self._slots: dict[PrefixKey, Slot] = {}
        self._users: dict[str, set[PrefixKey]] = {}
        self._uses = 0
        self.evictions = self.expired_pins = 0

    @property
    def budget(self) -> int:
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

    def lookup(self, key: PrefixKey) -> Slot | None:
        """The entry of a key, filling or ready."""
        return self._slots.get(key)

    def of_user(self, user: str) -> list[Slot]:
        """A user's readable entries, longest history first."""
        found = [self._slots[key] for key in self._users.get(user, ())]
        return sorted(
            (slot for slot in found if slot.state is State.READY),
            key=lambda slot: -slot.key.behaviours,
        )

    def reserve(self, key: PrefixKey, capacity: int) -> Slot | Busy:
        """Memory for `capacity` tokens under a new key, FILLING. Evicts what was used least
        recently, never what is pinned.
        """
        if key in self._slots:
            return Busy("exists")
        nbytes = self.shape.nbytes(capacity)
        if nbytes > self.budget:
            return Busy("larger_than_cache")
        offset = self.arena.take(nbytes)
        if offset is None:
            for slot in self._by_age():
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
        """Readable from now on; with a deadline, kept until it is consumed or the deadline passes."""
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
        """Gives up a slot that was never published."""
        if slot.state is not State.FILLING:
            raise ValueError("only a filling slot can be abandoned")
        self._remove(slot)

    def acquire(self, key: PrefixKey) -> Lease | None:
        """A lease on a ready entry. Whoever reads it consumes it: its pin ends, the lease keeps it
        while it lasts.
        """
        slot = self._slots.get(key)
        if slot is None or slot.state is not State.READY:
            return None
        slot.pinned_until = None
        self._touch(slot)
        return Lease(self, slot)

    def pin(self, slot: Slot, until: float) -> None:
        """Keeps a ready entry for a request that was announced."""
        if slot.state is not State.READY:
            raise ValueError("only a ready entry can be pinned")
        slot.pinned_until = until if slot.pinned_until is None else max(until, slot.pinned_until)
        self._touch(slot)

    def expire(self, now: float) -> int:
        """Ends pins whose deadline has passed: the request never came. Returns how many."""
        late = [
            slot
            for slot in self._slots.values()
            if slot.pinned_until is not None and slot.pinned_until <= now
        ]
        for slot in late:
            slot.pinned_until = None
        self.expired_pins += len(late)
        return len(late)

    def slots(self) -> Iterator[Slot]:
        """Every entry, for inspection."""
        return iter(tuple(self._slots.values()))

    def _by_age(self) -> list[Slot]:
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
