"""Files of fixed-size records that always open as they were at the last commit.

Touch this when the layout on disk or the way of committing changes. Every record has two slots. A
byte per record holds which slot is committed and which is live. A write goes to the slot that is
not committed; a commit writes the map of live slots and then, in one rename, the manifest that
names this map. Nothing that the manifest refers to is ever overwritten. So a process killed at any
moment, a full disk or a failed write leaves the last commit, without any repair. Records never
cross a 4 KiB block, so reading a cold record is one read.

    manifest.json            what the table is, its files and their sizes, the generation
    slices-00000-02047.rows  records of a range of slices, slots A and B in turn
                             (`numbered-….rows` where rows have numbers but no slices)
    map-12.bin               two bits per record: none, slot A, slot B
    companion-12.safetensors tensors committed together with the records (a hashed table's index)
    lock                     held by the one process that may write
"""

import fcntl
import os
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from slipstream.errors import SlipstreamError
from slipstream.files import atomic_file, read_json, write_json
from slipstream.tables.disk_transfer import EndOfFileError, transfer_records
from slipstream.tables.memory_pages import lazy_zeros

FORMAT = 1
BLOCK = 4096
MANIFEST, LOCK = "manifest.json", "lock"
_EARLIER_KEYS = {"rule": "optimizer"}  # keys of manifests written before, and their names now
_NONE, _A, _B = 0, 1, 2
_LIVE, _COMMITTED_SHIFT = 3, 2


class RecordFiles:
    """Records 0, 1, 2 … of `record_bytes` each; file f begins with record `first_of_file[f]`."""

    def __init__(
        self,
        directory: Path,
        spec: dict[str, Any],
        record_bytes: int,
        first_of_file: Sequence[int],
        names: Sequence[str],
        records: int,
    ) -> None:
        self.directory, self.spec, self.record_bytes = directory, spec, record_bytes
        self._block = -(-record_bytes // BLOCK) * BLOCK
        self._per_block = max(1, BLOCK // record_bytes)
        self._first_F, self._names = np.array(first_of_file, dtype=np.int64), list(names)
        self._where_N = np.zeros(0, dtype=np.uint8)
        self._descriptors: dict[int, int] = {}
        self._changed: set[int] = set()
        self._opening = threading.Lock()
        self.generation = 0
        self._lock = self._take_lock()
        try:
            self._manifest = self._open_manifest()
            self.resize(max(records, self._manifest.get("records", 0)))
            self._load_map()
            self._sweep()
        except BaseException:
            self.close()
            raise

    # -- opening --

    def _take_lock(self) -> int:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.directory / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise SlipstreamError(
                f"cannot open the table directory {self.directory}: {error.strerror or error}"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            raise SlipstreamError(
                f"the table in {self.directory} is already open for writing; wait until that job "
                "has ended or use another directory"
            ) from error
        return descriptor

    def _open_manifest(self) -> dict[str, Any]:
        path = self.directory / MANIFEST
        if not path.exists():
            return {}
        manifest = read_json(path)
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise SlipstreamError(
                f"{path} does not describe a table of format {FORMAT}; remove {self.directory}, a "
                "run fills it again from its checkpoint"
            )
        found = {_EARLIER_KEYS.get(name, name): it for name, it in manifest["table"].items()}
        for name, wanted in self.spec.items():
            if found.get(name) != wanted:
                raise SlipstreamError(
                    f"the table in {self.directory} has {name} {found.get(name)}, but {wanted} is "
                    "asked for; use the recipe it was trained with, or another directory"
                )
        for name, size in manifest["files"].items():
            file = self.directory / name
            if not file.exists():
                raise SlipstreamError(
                    f"{file} is missing, so this table cannot be opened; restore it from a copy"
                )
            if file.stat().st_size < size:
                raise SlipstreamError(
                    f"{file} is cut short ({file.stat().st_size} of {size} bytes); restore it "
                    "from a copy"
                )
        self.generation = int(manifest["generation"])
        return manifest

    def _load_map(self) -> None:
        if not self._manifest:
            return
        path = self.directory / self._manifest["map"]["name"]
        try:
            packed = path.read_bytes()
        except OSError as error:
            raise SlipstreamError(
                f"{path} is missing, so this table cannot be opened; restore it from a copy"
            ) from error
        if zlib.crc32(packed) != self._manifest["map"]["crc32"]:
            raise SlipstreamError(
                f"{path} is damaged, so this table cannot be opened; restore it from a copy"
            )
        planes = np.unpackbits(
            np.frombuffer(packed, dtype=np.uint8).reshape(2, -1), axis=1, bitorder="little"
        )
        live = planes[0, : self._manifest["records"]] + _B * planes[1, : self._manifest["records"]]
        self._where_N[: len(live)] = live | (live << _COMMITTED_SHIFT)

    def _sweep(self) -> None:
        """Remove files that the manifest does not name: the leftovers of a killed process."""
        known = {MANIFEST, LOCK, *self._manifest.get("files", {}), self._manifest.get("companion")}
        known.add(self._manifest.get("map", {}).get("name"))
        for path in self.directory.iterdir():
            ours = (
                path.name.startswith(
                    (".map-", ".companion-", ".manifest.json.", "map-", "companion-")
                )
                or path.suffix == ".rows"
            )
            if ours and path.name not in known:
                path.unlink(missing_ok=True)

    @property
    def records(self) -> int:
        """Return how many records the map has room for."""
        return len(self._where_N)

    def companion(self) -> dict[str, torch.Tensor]:
        """Return the tensors committed together with the records; empty if there are none."""
        name = self._manifest.get("companion")
        if name is None:
            return {}
        try:
            return load_file(self.directory / name)
        except (OSError, SafetensorError) as error:
            raise SlipstreamError(
                f"{self.directory / name} is missing or damaged; restore it from a copy"
            ) from error

    # -- records --

    def resize(self, records: int) -> None:
        """Make room in the map for records 0 … records - 1."""
        if records > len(self._where_N):
            larger = lazy_zeros(records, dtype=torch.uint8).numpy()
            larger[: len(self._where_N)] = self._where_N
            self._where_N = larger

    def written(self, numbers_U: np.ndarray) -> np.ndarray:
        """Return which of these records have been written."""
        written_U: np.ndarray = (self._where_N[numbers_U] & _LIVE) != _NONE
        return written_U

    def all_written(self, begin: int, end: int) -> np.ndarray:
        """Return the numbers of all records written between `begin` and `end`."""
        return begin + np.flatnonzero((self._where_N[begin:end] & _LIVE) != _NONE)

    def forget_all(self) -> None:
        """Forget every record; the last commit stays on disk until the next one."""
        self._where_N &= ~np.uint8(_LIVE)

    def read(self, numbers_U: np.ndarray, threads: int) -> torch.Tensor:
        """Read records that have been written, with several threads; uint8 [U, record_bytes]."""
        files_U, offsets_U = self._place(numbers_U, self._where_N[numbers_U] & _LIVE)
        records = torch.empty(len(numbers_U), self.record_bytes, dtype=torch.uint8)
        try:
            transfer_records(files_U, offsets_U, records, threads, writes=False)
        except EndOfFileError as error:
            raise SlipstreamError(
                f"a file of the table in {self.directory} is cut short; restore it from a copy"
            ) from error
        except OSError as error:
            raise SlipstreamError(
                f"cannot read the table in {self.directory}: {error.strerror}"
            ) from error
        return records

    def write(self, numbers_U: np.ndarray, records: torch.Tensor, threads: int) -> None:
        """Write records to their uncommitted slots; the next commit makes them durable."""
        committed_U = self._where_N[numbers_U] >> _COMMITTED_SHIFT
        slots_U = np.where(committed_U == _A, _B, _A).astype(np.uint8)
        files_U, offsets_U = self._place(numbers_U, slots_U, create=True)
        transfer_records(files_U, offsets_U, records, threads, writes=True)
        self._where_N[numbers_U] = (committed_U << _COMMITTED_SHIFT) | slots_U

    def _place(
        self, numbers_U: np.ndarray, slots_U: np.ndarray, *, create: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the file descriptor and the offset of each record's slot."""
        files_U = np.searchsorted(self._first_F, numbers_U, side="right") - 1
        inside_U = numbers_U - self._first_F[files_U]
        blocks_U = 2 * (inside_U // self._per_block) + (slots_U == _B)
        offsets_U = blocks_U * self._block + (inside_U % self._per_block) * self.record_bytes
        used = np.unique(files_U)
        descriptors = np.array(
            [self._descriptor(int(file), create) for file in used], dtype=np.int32
        )
        return descriptors[np.searchsorted(used, files_U)], offsets_U

    def _descriptor(self, file: int, create: bool) -> int:
        with self._opening:
            if create:
                self._changed.add(file)
            if file not in self._descriptors:
                flags = os.O_RDWR | (os.O_CREAT if create else 0)
                path = self.directory / self._names[file]
                try:
                    descriptor = os.open(path, flags, 0o644)
                except OSError as error:
                    raise SlipstreamError(
                        f"cannot open {path}: {error.strerror or error}"
                    ) from error
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
                self._descriptors[file] = descriptor
            return self._descriptors[file]

    # -- committing --

    def commit(self, companion: dict[str, torch.Tensor] | None) -> None:
        """Make everything written so far durable; an OSError or SlipstreamError changes nothing."""
        for file in self._changed:
            os.fsync(self._descriptors[file])
        generation = self.generation + 1
        live = self._where_N & _LIVE
        packed = np.stack(
            [np.packbits(live & 1, bitorder="little"), np.packbits(live >> 1, bitorder="little")]
        ).tobytes()
        names = {
            "map": f"map-{generation}.bin",
            "companion": None if companion is None else f"companion-{generation}.safetensors",
        }
        with atomic_file(self.directory / str(names["map"])) as path:
            path.write_bytes(packed)
        if companion is not None:
            with atomic_file(self.directory / str(names["companion"])) as path:
                try:
                    save_file({name: value.contiguous() for name, value in companion.items()}, path)
                except SafetensorError as error:
                    raise OSError(None, str(error)) from error
        sizes = {
            self._names[file]: os.fstat(descriptor).st_size
            for file, descriptor in self._descriptors.items()
        }
        manifest = {
            "format": FORMAT,
            "generation": generation,
            "table": self.spec,
            "records": len(self._where_N),
            "files": {**self._manifest.get("files", {}), **sizes},
            "map": {"name": names["map"], "crc32": zlib.crc32(packed)},
            "companion": names["companion"],
        }
        write_json(self.directory / MANIFEST, manifest)
        self._manifest, self.generation = manifest, generation
        self._where_N[:] = live | (live << _COMMITTED_SHIFT)
        self._changed.clear()
        self._sweep()

    def close(self) -> None:
        """Close the files and release the lock, without committing."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
