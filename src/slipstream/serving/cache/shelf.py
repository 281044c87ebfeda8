"""A shelf of bytes in shared memory that outlives the process: extents of payload and a crash-safe
table of records.

    | header 4 KiB: magic, identity | records, 128 bytes each | payload … |

The file lies in shared memory (/dev/shm), so whoever writes it may be killed at any moment and what
was stored stays. A record is written after its payload and carries a checksum of itself: a torn or
half-made one is dropped when the shelf is opened again. A record is wiped before its bytes are used
anew. `identity` says what the payload means (model version, layout, sizes): a shelf of another
identity is emptied, never read. One process at a time, held by a lock on the file. All its memory
is taken when it is made: what does not fit is an error then, not a fault in the middle of a copy.
"""

import fcntl
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from slipstream.errors import SlipstreamError
from slipstream.serving.cache.arena import Extents

_MAGIC = b"slipstream shelf 1"
_HEADER, _RECORD = 4096, 128
_FIELDS = struct.Struct(
    "<QQQQQQ16s16sQ"
)  # used, order, offset, nbytes, tokens, behaviours, user, digest, payload checksum
_CHECK = struct.Struct("<Q")


@dataclass
class Record:
    """One stored payload."""

    place: int
    order: int  # grows with use: the smallest was used least recently
    offset: int
    nbytes: int
    tokens: int
    behaviours: int
    user: bytes
    digest: bytes
    checksum: int
    verified: bool  # False: inherited from an earlier process and not read since


class Shelf:
    """An opened shelf. `records` is what may be read."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        payload_bytes: int,
        identity: bytes,
        max_records: int = 4096,
    ) -> None:
        self.path = Path(path)
        self._records_at, self._payload_at = (
            _HEADER,
            _HEADER + _round(max_records * _RECORD, mmap.PAGESIZE),
        )
        self.extents = Extents(payload_bytes)
        size = self._payload_at + self.extents.nbytes
        self._file = self._locked_file(size)
        self._map = mmap.mmap(self._file, size)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.max_records = max_records
        self._free_places = list(range(max_records - 1, -1, -1))
        self.records: dict[tuple[bytes, int, bytes], Record] = {}
        self.dropped = 0  # torn or foreign records found at opening
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
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            raise SlipstreamError(
                f"shared memory {self.path} is in use by another instance; give each instance its "
                "own"
            ) from error
        if os.fstat(file).st_size == size:
            return file
        try:
            os.ftruncate(file, size)
            os.posix_fallocate(file, 0, size)
        except OSError as error:
            os.ftruncate(file, 0)
            os.close(file)
            wanted = f"{size / 2**20:.0f} MiB"
            raise SlipstreamError(
                f"shared memory {self.path} has no room for {wanted} ({error.strerror}); enlarge it"
            ) from error
        return file

    def take(self, nbytes: int) -> int | None:
        """Room for a payload; None where neither bytes nor a record are free."""
        return self.extents.take(nbytes) if self._free_places else None

    def give(self, offset: int, nbytes: int) -> None:
        """Gives room back that was taken but never recorded."""
        self.extents.give(offset, nbytes)

    def payload(self, offset: int, nbytes: int) -> torch.Tensor:
        """The bytes themselves, a view of the shared memory."""
        return self._bytes[self._payload_at + offset : self._payload_at + offset + nbytes]

    def checksum(self, offset: int, nbytes: int) -> int:
        """Of a payload as it lies there now."""
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
        """Makes a written payload readable, now and after a crash."""
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
        """Remembers that a record was used."""
        self._order += 1
        record.order = self._order
        self._write(record)

    def remove(self, record: Record) -> None:
        """Wipes the record, then frees its bytes."""
        at = self._records_at + record.place * _RECORD
        self._map[at : at + _RECORD] = bytes(_RECORD)
        del self.records[record.user, record.behaviours, record.digest]
        self._free_places.append(record.place)
        self.extents.give(record.offset, record.nbytes)

    def verify(self, record: Record) -> bool:
        """Whether the payload is what was written; a record of this process was never out of hand."""
        if not record.verified:
            record.verified = self.checksum(record.offset, record.nbytes) == record.checksum
        return record.verified

    def close(self) -> None:
        """Lets go of the lock; the memory stays for the next process."""
        if self._file >= 0:
            fcntl.flock(
                self._file, fcntl.LOCK_UN
            )  # the mapping shares the lock, so closing alone would keep it
            os.close(self._file)
            self._file = -1

    def unlink(self) -> None:
        """Removes the shelf for good."""
        self.close()
        self.path.unlink(missing_ok=True)

    def _write(self, r: Record) -> None:
        fields = _FIELDS.pack(
            1, r.order, r.offset, r.nbytes, r.tokens, r.behaviours, r.user, r.digest, r.checksum
        )
        at = self._records_at + r.place * _RECORD
        self._map[at : at + _FIELDS.size + _CHECK.size] = fields + _CHECK.pack(
            xxhash.xxh3_64_intdigest(fields)
        )

    def _recover(self) -> None:
        """Takes over what an earlier process left behind; anything doubtful is dropped."""
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
            sound = (
                check == xxhash.xxh3_64_intdigest(fields)
                and offset % 64 == 0
                and nbytes > 0
                and key not in self.records
            )
            if not sound or not self.extents.take_at(offset, nbytes):
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
