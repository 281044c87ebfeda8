"""A shelf: payloads in shared memory that outlive the process, with a table of records.

    | header 4 KiB: magic, identity | records, 128 bytes each | payload … |

The file is in shared memory (/dev/shm), so its content survives a kill of the process. A record is
written after its payload and contains a checksum of itself: opening a shelf drops incomplete
records. A record is wiped before its bytes are used again. `identity` names what the payload means
(model version, layout, sizes): a shelf of another identity is emptied, never read. A lock on the
file admits one process at a time. Memory is allocated before it is written, a piece at a time:
where the system has none left, a shelf stays smaller than its limit, and nothing faults in the
middle of a copy. Touch this when the file's layout changes.
"""

import asyncio
import errno
import fcntl
import mmap
import os
import struct
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from slipstream.errors import SlipstreamError
from slipstream.serving.cache.arena import Extents
from slipstream.serving.cache.pages import populate
from slipstream.serving.clock import SYSTEM_CLOCK, Clock

_MAGIC = b"slipstream shelf 1"
_HEADER, _RECORD = 4096, 128
# used, order, offset, nbytes, tokens, behaviours, user, digest, payload checksum
_FIELDS = struct.Struct("<QQQQQQ16s16sQ")
_CHECK = struct.Struct("<Q")
_PIECE = 1 << 20  # bytes by which a shelf grows
_LEFT_FREE = 4 << 20  # bytes of the file system left for others
_LOCK_SECONDS = 3.0  # for the instance before to end
_RETRY_SECONDS = 5.0  # after the system had no memory left


@dataclass
class Record:
    """One payload of a shelf."""

    place: int  # the record's number in the table
    order: int  # grows with use: the smallest was used least recently
    offset: int
    nbytes: int
    tokens: int
    behaviours: int
    user: bytes
    digest: bytes
    checksum: int
    verified: bool  # False: written by an earlier process and not checked yet


class Shelf:
    """An open shelf of at most `payload_bytes`. `records` are the payloads that may be read."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        payload_bytes: int,
        identity: bytes,
        max_records: int = 4096,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.path, self._clock = Path(path), clock
        self._records_at, self._payload_at = (
            _HEADER,
            _HEADER + _round(max_records * _RECORD, mmap.PAGESIZE),
        )
        self.limit = Extents(payload_bytes).nbytes
        self.extents = Extents(0)  # grows with what is stored
        self._grow_again_at, self._growing = 0.0, False
        size = self._payload_at + self.limit
        self._file = self._locked_file(size)
        self._map = mmap.mmap(self._file, size)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.max_records = max_records
        self._free_places = list(range(max_records - 1, -1, -1))
        # The record used least recently is the first.
        self.records: OrderedDict[tuple[bytes, int, bytes], Record] = OrderedDict()
        self.dropped = 0  # incomplete records found at opening
        self._order = 0
        header = _MAGIC + xxhash.xxh3_128_digest(
            identity + struct.pack("<QQ", payload_bytes, max_records)
        )
        if self._map[: len(header)] == header:
            self._recover()
        else:
            self._map[: self._payload_at] = bytes(self._payload_at)
            self._map[: len(header)] = header

    def _locked_file(self, size: int) -> int:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise SlipstreamError(
                f"shared memory {self.path} cannot be opened: {error.strerror}"
            ) from error
        end = self._clock.now() + _LOCK_SECONDS
        while not _lock(file):
            if self._clock.now() > end:
                os.close(file)
                raise SlipstreamError(
                    f"shared memory {self.path} is in use by another instance; give each instance "
                    "its own"
                )
            threading.Event().wait(0.02)
        if os.fstat(file).st_size == size:
            return file
        try:
            os.ftruncate(file, 0)  # what was there has another layout
            os.ftruncate(file, size)
            os.posix_fallocate(file, 0, self._payload_at)
        except OSError as error:
            os.ftruncate(file, 0)
            os.close(file)
            raise SlipstreamError(
                f"shared memory {self.path} has no room ({error.strerror}); enlarge it"
            ) from error
        return file

    def take(self, nbytes: int) -> int | None:
        """Take room for a payload; None where no bytes or no record are free."""
        if not self._free_places:
            return None
        offset = self.extents.take(nbytes)
        if offset is None and self._grow(nbytes):
            offset = self.extents.take(nbytes)
        return offset

    def missing_bytes(self, nbytes: int, piece: int = _PIECE) -> int:
        """The bytes to allocate, in pieces, before a payload fits.

        0 where it fits, at the limit, or where the system had none lately.
        """
        if self.extents.fits_after(nbytes, ()):
            return 0
        needed, left = Extents.rounded(nbytes), self.limit - self.extents.nbytes
        wanted = min(_round(needed, piece), left)
        if wanted < needed or self._growing or self._clock.now() < self._grow_again_at:
            return 0
        return wanted

    def _grow(self, nbytes: int) -> bool:
        """Allocate more memory for a payload; False at the limit, or where the system has none."""
        wanted = self.missing_bytes(nbytes)
        return wanted > 0 and self._grown(wanted, self._allocate(self._file, wanted))

    async def grow(self, nbytes: int) -> None:
        """Allocate memory in a thread, its pages too: they take a system's time to be had."""
        if self._file < 0:
            return  # closed
        self._growing, file = True, os.dup(self._file)  # the shelf may be closed meanwhile
        new = self.payload(self.extents.nbytes, nbytes)
        try:
            done = await asyncio.to_thread(self._allocate, file, nbytes)
            if done:
                await asyncio.to_thread(populate, new)
        finally:
            self._growing = False
            os.close(file)
        self._grown(nbytes, done)

    def _allocate(self, file: int, nbytes: int) -> bool:
        """Have the system allocate the bytes after the last; False where it has none."""
        try:
            system = os.fstatvfs(file)
            if system.f_bavail * system.f_frsize < nbytes + _LEFT_FREE:
                raise OSError(errno.ENOSPC, "no room")
            os.posix_fallocate(file, self._payload_at + self.extents.nbytes, nbytes)
        except OSError:
            return False
        return True

    def _grown(self, nbytes: int, done: bool) -> bool:
        """Use allocated bytes, or ask for none for a while where the system had none."""
        if done:
            self.extents.grow(nbytes)
        else:
            self._grow_again_at = self._clock.now() + _RETRY_SECONDS
        return done

    def give(self, offset: int, nbytes: int) -> None:
        """Return room that was taken but never recorded."""
        self.extents.give(offset, nbytes)

    def payload(self, offset: int, nbytes: int) -> torch.Tensor:
        """The bytes of a payload, a view of the shared memory."""
        return self._bytes[self._payload_at + offset : self._payload_at + offset + nbytes]

    def checksum(self, offset: int, nbytes: int) -> int:
        """The checksum of a payload's present bytes."""
        return xxhash.xxh3_64_intdigest(self.payload(offset, nbytes).numpy().data)

    def record(
        self,
        offset: int,
        nbytes: int,
        checksum: int,
        *,
        tokens: int,
        behaviours: int,
        user: bytes,
        digest: bytes,
    ) -> Record:
        """Make a written payload readable, now and after a kill."""
        self._order += 1
        found = Record(
            self._free_places.pop(),
            self._order,
            offset,
            nbytes,
            tokens,
            behaviours,
            user,
            digest,
            checksum,
            True,
        )
        self._write(found)
        self.records[user, behaviours, digest] = found
        return found

    def touch(self, record: Record) -> None:
        """Make a record the most recently used."""
        self._order += 1
        record.order = self._order
        self.records.move_to_end((record.user, record.behaviours, record.digest))
        self._write(record)

    def remove(self, record: Record) -> None:
        """Wipe a record, then free its bytes."""
        at = self._records_at + record.place * _RECORD
        self._map[at : at + _RECORD] = bytes(_RECORD)
        del self.records[record.user, record.behaviours, record.digest]
        self._free_places.append(record.place)
        self.extents.give(record.offset, record.nbytes)

    def verify(self, record: Record) -> bool:
        """Whether the payload is as written; checked once, for records of an earlier process."""
        if not record.verified:
            record.verified = self.checksum(record.offset, record.nbytes) == record.checksum
        return record.verified

    def close(self) -> None:
        """Release the lock; the memory stays for the next process."""
        if self._file >= 0:
            # the mapping shares the lock: closing the file alone would keep it
            fcntl.flock(self._file, fcntl.LOCK_UN)
            os.close(self._file)
            self._file = -1

    def _write(self, r: Record) -> None:
        fields = _FIELDS.pack(
            1, r.order, r.offset, r.nbytes, r.tokens, r.behaviours, r.user, r.digest, r.checksum
        )
        at = self._records_at + r.place * _RECORD
        self._map[at : at + _FIELDS.size + _CHECK.size] = fields + _CHECK.pack(
            xxhash.xxh3_64_intdigest(fields)
        )

    def _recover(self) -> None:
        """Read the records of an earlier process; drop the incomplete ones."""
        self.extents.grow(self.limit)
        self._read_records()
        by_age = sorted(self.records.items(), key=lambda item: item[1].order)
        self.records = OrderedDict(by_age)
        ends = [r.offset + Extents.rounded(r.nbytes) for r in self.records.values()]
        self.extents = Extents(max(ends, default=0))  # the rest may not be allocated
        for record in self.records.values():
            self.extents.take_at(record.offset, record.nbytes)

    def _read_records(self) -> None:
        for place in range(self.max_records):
            at = self._records_at + place * _RECORD
            fields = self._map[at : at + _FIELDS.size]
            if not any(fields):
                continue
            (check,) = _CHECK.unpack_from(self._map, at + _FIELDS.size)
            _, order, offset, nbytes, tokens, behaviours, user, digest, checksum = _FIELDS.unpack(
                fields
            )
            key = (user, behaviours, digest)
            complete = (
                check == xxhash.xxh3_64_intdigest(fields)
                and offset % 64 == 0
                and nbytes > 0
                and key not in self.records
            )
            if not complete or not self.extents.take_at(offset, nbytes):
                self._map[at : at + _RECORD] = bytes(_RECORD)
                self.dropped += 1
                continue
            self._free_places.remove(place)
            self.records[key] = Record(
                place, order, offset, nbytes, tokens, behaviours, user, digest, checksum, False
            )
            self._order = max(self._order, order)


def _round(size: int, to: int) -> int:
    return (size + to - 1) // to * to


def _lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
