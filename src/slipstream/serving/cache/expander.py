"""The expander: a second tier for prefixes in host memory that outlives the process, so that a
restarted instance starts warm.

After ranking, a prefix is demoted: copied to a shelf of shared memory (expander_shelf.py), with a
budget of its own and the least recently used one leaving first. It comes back as the past of a
prefill: an exact entry is copied, a shorter one extended. What is being read is held and cannot
leave. A shelf belongs to one model version, one layout and one shape; of any other it is emptied.
"""

import hashlib
import os
from collections.abc import Iterator
from typing import Self

from slipstream.serving.cache.shelf import Record, Shelf
from slipstream.serving.engine.encoding import EncodedHistory
from slipstream.serving.engine.engine import Engine
from slipstream.serving.engine.prefix import LAYOUT_VERSION, Prefix, PrefixBuffer, PrefixKey


def user_name(user: str) -> bytes:
    """16 bytes that stand for a user on the shelf."""
    return hashlib.blake2b(user.encode(), digest_size=16).digest()


class HostLease:
    """The right to read an entry of the shelf; ends with `release` or the `with` block."""

    def __init__(self, expander: "Expander", record: Record, prefix: Prefix) -> None:
        self._expander, self.record, self.prefix = expander, record, prefix
        self._held = True
        expander._holders[record.place] = expander._holders.get(record.place, 0) + 1

    def release(self) -> None:
        """Once; a second call does nothing."""
        if self._held:
            self._held = False
            self._expander._let_go(self.record)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Storing:
    """A demotion on its way: memory taken on the shelf, filled step by step, recorded at the end."""

    def __init__(
        self, shelf: Shelf, key: PrefixKey, prefix: Prefix, offset: int, nbytes: int
    ) -> None:
        self.key, self.prefix, self.offset, self.nbytes = key, prefix, offset, nbytes
        self.checksum = 0
        self._shelf = shelf

    def steps(self) -> Iterator[int]:
        """Copies a layer at a time and sums up last (for the compute thread); yields the layers
        done.
        """
        shape = self.prefix.buffer.shape
        memory = self._shelf.payload(self.offset, self.nbytes)
        buffer = PrefixBuffer(shape, self.prefix.tokens, memory)
        for layer in range(shape.layers):
            buffer.copy_layer(self.prefix.buffer, self.prefix.tokens, layer)
            yield layer + 1
        self.checksum = self._shelf.checksum(self.offset, self.nbytes)


class Expander:
    """Prefixes of one engine in shared memory, within a budget."""

    def __init__(self, engine: Engine, path: str | os.PathLike[str], budget: int) -> None:
        self.engine = engine
        identity = repr((engine.version, LAYOUT_VERSION, engine.shape, engine.hold)).encode()
        self.shelf = Shelf(path, budget, identity)
        self._holders: dict[int, int] = {}
        self._storing: set[PrefixKey] = set()
        self._users: dict[bytes, set[tuple[bytes, int, bytes]]] = {}
        for key, record in list(self.shelf.records.items()):
            tokens = engine.cached_tokens(record.behaviours)
            if (record.tokens, record.nbytes) != (tokens, engine.shape.nbytes(tokens)):
                self.shelf.remove(record)
                continue
            self._users.setdefault(key[0], set()).add(key)
        self.warm = len(self.shelf.records)
        self.evictions = self.damaged = 0

    @property
    def budget(self) -> int:
        return self.shelf.extents.nbytes

    @property
    def used(self) -> int:
        return self.shelf.extents.used

    def __len__(self) -> int:
        return len(self.shelf.records)

    def has(self, key: PrefixKey) -> bool:
        """Whether this very prefix is on the shelf, or on its way there."""
        return (
            key in self._storing
            or (user_name(key.user), key.behaviours, key.digest) in self.shelf.records
        )

    def find(
        self, user: str, encoded: EncodedHistory, digests: dict[int, bytes]
    ) -> HostLease | None:
        """The user's longest entry that is a prefix of this history, held. `digests` remembers
        those computed so far.
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

    def begin(self, key: PrefixKey, prefix: Prefix) -> Storing | None:
        """Takes room for a prefix; None where it is there already, or where all that could leave is
        not enough.
        """
        if self.has(key) or key.version != self.engine.version or not prefix.tokens:
            return None
        nbytes = self.engine.shape.nbytes(prefix.tokens)
        if nbytes > self.budget:
            return None
        offset = self.shelf.take(nbytes)
        if offset is None:
            for record in sorted(self.shelf.records.values(), key=lambda record: record.order):
                if self._holders.get(record.place):
                    continue
                self._remove(record)
                self.evictions += 1
                if (offset := self.shelf.take(nbytes)) is not None:
                    break
            else:
                return None
        self._storing.add(key)
        return Storing(self.shelf, key, prefix, offset, nbytes)

    def finish(self, storing: Storing) -> None:
        """Records a prefix whose steps have all run: it may be found from now on."""
        self._storing.discard(storing.key)
        key = storing.key
        name = user_name(key.user)
        self.shelf.record(
            storing.offset,
            storing.nbytes,
            storing.checksum,
            tokens=storing.prefix.tokens,
            behaviours=key.behaviours,
            user=name,
            digest=key.digest,
        )
        self._users.setdefault(name, set()).add((name, key.behaviours, key.digest))

    def cancel(self, storing: Storing) -> None:
        """Gives the room of an unfinished demotion back."""
        self._storing.discard(storing.key)
        self.shelf.give(storing.offset, storing.nbytes)

    def sound(self, lease: HostLease) -> bool:
        """Whether a held entry is what was written (checked once for entries of an earlier
        process).
        """
        return self.shelf.verify(lease.record)

    def drop(self, lease: HostLease) -> None:
        """Throws a damaged entry away and ends its lease."""
        self.damaged += 1
        lease.release()
        key = (lease.record.user, lease.record.behaviours, lease.record.digest)
        if self.shelf.records.get(key) is lease.record and not self._holders.get(
            lease.record.place
        ):
            self._remove(lease.record)

    def close(self) -> None:
        """Lets go of the shelf; what is on it waits for the next process."""
        self.shelf.close()

    def _lease(self, record: Record, encoded: EncodedHistory) -> HostLease:
        self.shelf.touch(record)
        buffer = PrefixBuffer(
            self.engine.shape, record.tokens, self.shelf.payload(record.offset, record.nbytes)
        )
        prefix = self.engine.prefix_of(encoded.part(0, record.behaviours), buffer, record.digest)
        return HostLease(self, record, prefix)

    def _let_go(self, record: Record) -> None:
        self._holders[record.place] -= 1
        if not self._holders[record.place]:
            del self._holders[record.place]

    def _remove(self, record: Record) -> None:
        key = (record.user, record.behaviours, record.digest)
        self._users[record.user].discard(key)
        if not self._users[record.user]:
            del self._users[record.user]
        self.shelf.remove(record)
