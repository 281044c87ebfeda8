"""The expander: the host tier of the prefix cache, in shared memory that outlives the process.

After ranking, a prefix is demoted: copied to a shelf (shelf.py) with its own byte budget, where
the least recently used entry leaves first. A later prefill starts from it: an entry of the same
length is copied, a shorter one is extended. An entry that is being read is held and cannot leave. A
shelf belongs to one model version, layout and shape; for any other it is emptied. So a restarted
instance starts warm. Touch this when prefixes are demoted or found again in another way.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from typing import Self

from slipstream.serving.cache.shelf import Record, Shelf
from slipstream.serving.engine.encoding import EncodedHistory
from slipstream.serving.engine.engine import Engine
from slipstream.serving.engine.prefix import LAYOUT_VERSION, Prefix, PrefixKey


def user_name(user: str) -> bytes:
    """The 16 bytes that stand for a user on the shelf."""
    return hashlib.blake2b(user.encode(), digest_size=16).digest()


class HostLease:
    """The right to read an entry of the shelf; it ends with `release` or with the `with` block."""

    def __init__(self, expander: "Expander", record: Record, prefix: Prefix) -> None:
        self._expander, self.record, self.prefix = expander, record, prefix
        self._held = True
        expander._holders[record.place] = expander._holders.get(record.place, 0) + 1

    def release(self) -> None:
        """End the lease; a second call does nothing."""
        if self._held:
            self._held = False
            self._expander._release(self.record)

    def verify(self) -> bool:
        """Whether the entry is as written; checked once, for entries of an earlier process."""
        return self._expander.shelf.verify(self.record)

    def drop(self) -> None:
        """End the lease and remove the entry, which is damaged."""
        self.release()
        self._expander._drop(self.record)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Demotion:
    """A copy of a prefix to the shelf: its room is taken, then filled in steps, then recorded."""

    def __init__(
        self, shelf: Shelf, key: PrefixKey, prefix: Prefix, offset: int, nbytes: int
    ) -> None:
        self.key, self.prefix, self.offset, self.nbytes = key, prefix, offset, nbytes
        self.checksum = 0
        self._shelf = shelf

    def steps(self) -> Iterator[int]:
        """Copy one layer a step, then the checksum (compute thread); yield the layers copied."""
        shape = self.prefix.buffer.shape
        memory = self._shelf.payload(self.offset, self.nbytes)
        buffer = shape.buffer(self.prefix.tokens, memory)
        for layer in range(shape.layers):
            buffer.copy_layer(self.prefix.buffer, self.prefix.tokens, layer)
            yield layer + 1
        self.checksum = self._shelf.checksum(self.offset, self.nbytes)


class Expander:
    """Prefixes of one engine in shared memory within a byte budget."""

    def __init__(
        self,
        engine: Engine,
        path: str | os.PathLike[str],
        budget: int,
        open_shelf: Callable[[str | os.PathLike[str], int, bytes], Shelf] = Shelf,
    ) -> None:
        self.engine = engine
        identity = repr((engine.version, LAYOUT_VERSION, engine.shape, engine.hold)).encode()
        self.shelf = open_shelf(path, budget, identity)
        self._holders: dict[int, int] = {}
        self._demoting: set[PrefixKey] = set()
        self._users: dict[bytes, set[tuple[bytes, int, bytes]]] = {}
        for key, record in list(self.shelf.records.items()):
            tokens = engine.cached_tokens(record.behaviours)
            if (record.tokens, record.nbytes) != (tokens, engine.shape.nbytes(tokens)):
                self.shelf.remove(record)
                continue
            self._users.setdefault(key[0], set()).add(key)
        self.warm = len(self.shelf.records)
        self.damaged = 0

    @property
    def budget(self) -> int:
        """Bytes the shelf may have for payloads."""
        return self.shelf.limit

    @property
    def allocated(self) -> int:
        """Bytes the shelf has for payloads now: it grows while shared memory is left."""
        return self.shelf.extents.nbytes

    @property
    def used(self) -> int:
        """Bytes in use, demotions under way included."""
        return self.shelf.extents.used

    def __len__(self) -> int:
        return len(self.shelf.records)

    def has(self, key: PrefixKey) -> bool:
        """Whether exactly this prefix is on the shelf, or is being copied there."""
        return (
            key in self._demoting
            or (user_name(key.user), key.behaviours, key.digest) in self.shelf.records
        )

    def find(
        self, user: str, encoded: EncodedHistory, digests: dict[int, bytes]
    ) -> HostLease | None:
        """Lease the user's longest entry that is a prefix of this history.

        `digests` keeps the digests of the history computed so far, by number of behaviours.
        """
        for key in sorted(self._users.get(user_name(user), ()), key=lambda key: -key[1]):
            behaviours = key[1]
            if behaviours > len(encoded):
                continue
            if behaviours not in digests:
                digests[behaviours] = encoded.digest(behaviours)
            if digests[behaviours] == key[2]:
                return self._lease(self.shelf.records[key], encoded)
        return None

    def begin(self, key: PrefixKey, prefix: Prefix) -> Demotion | None:
        """Take room for a prefix; None where it is stored already or no room can be made."""
        if self.has(key) or key.version != self.engine.version or not prefix.tokens:
            return None
        nbytes = self.engine.shape.nbytes(prefix.tokens)
        if nbytes > self.budget:
            return None
        offset = self.shelf.take(nbytes)
        if offset is None:
            pieces = ((record.offset, record.nbytes) for record in self._free_by_age())
            if not self.shelf.extents.fits_after(nbytes, pieces):
                return None
            while offset is None:
                record = next(self._free_by_age(), None)
                if record is None:
                    return None
                self._remove(record)
                offset = self.shelf.take(nbytes)
        self._demoting.add(key)
        return Demotion(self.shelf, key, prefix, offset, nbytes)

    def finish(self, demotion: Demotion) -> None:
        """Record a prefix whose steps have all run: `find` finds it from now on."""
        key = demotion.key
        self._demoting.discard(key)
        name = user_name(key.user)
        self.shelf.record(
            demotion.offset,
            demotion.nbytes,
            demotion.checksum,
            tokens=demotion.prefix.tokens,
            behaviours=key.behaviours,
            user=name,
            digest=key.digest,
        )
        self._users.setdefault(name, set()).add((name, key.behaviours, key.digest))

    def cancel(self, demotion: Demotion) -> None:
        """Return the room of an unfinished demotion."""
        self._demoting.discard(demotion.key)
        self.shelf.give(demotion.offset, demotion.nbytes)

    def forget(self, user: str) -> int:
        """Remove a user's entries; return how many are still being copied or read."""
        records = [self.shelf.records[key] for key in self._users.get(user_name(user), ())]
        held = [record for record in records if self._holders.get(record.place)]
        for record in records:
            if record not in held:
                self._remove(record)
        return len(held) + sum(key.user == user for key in self._demoting)

    def close(self) -> None:
        """Close the shelf; its entries stay for the next process."""
        self.shelf.close()

    def _lease(self, record: Record, encoded: EncodedHistory) -> HostLease:
        self.shelf.touch(record)
        buffer = self.engine.shape.buffer(
            record.tokens, self.shelf.payload(record.offset, record.nbytes)
        )
        prefix = self.engine.prefix_of(encoded.part(0, record.behaviours), buffer, record.digest)
        return HostLease(self, record, prefix)

    def _free_by_age(self) -> Iterator[Record]:
        """Iterate over the entries that nobody reads, the least recently used first."""
        records = self.shelf.records.values()
        return (record for record in records if not self._holders.get(record.place))

    def _release(self, record: Record) -> None:
        self._holders[record.place] -= 1
        if not self._holders[record.place]:
            del self._holders[record.place]

    def _drop(self, record: Record) -> None:
        self.damaged += 1
        key = (record.user, record.behaviours, record.digest)
        if self.shelf.records.get(key) is record and not self._holders.get(record.place):
            self._remove(record)

    def _remove(self, record: Record) -> None:
        key = (record.user, record.behaviours, record.digest)
        self._users[record.user].discard(key)
        if not self._users[record.user]:
            del self._users[record.user]
        self.shelf.remove(record)
