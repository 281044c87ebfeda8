"""A table on disk, which may be larger than memory.

Touch this when cache and files work together differently; the record layout is in disk_records.py,
the way of committing in disk_files.py.

Rows are in files, read by several threads. A write-back cache of `cache_bytes` holds the rows in
use, and optimizers update them there. `flush` makes all rows durable; a process killed at any
moment leaves the table as of its last flush. Files are read without holding the table's lock, so
some threads may read rows while another trains. The schedule decides which rows may be read when.
"""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slipstream.errors import SlipstreamError
from slipstream.ops.row_gather import gather_rows
from slipstream.ops.rows import unique_keys
from slipstream.tables.disk_cache import RowCache
from slipstream.tables.disk_files import RecordFiles
from slipstream.tables.disk_records import (
    Numbering,
    PlainNumbering,
    RecordFormat,
    SliceNumbering,
    ranges,
)
from slipstream.tables.embedding_table import (
    CHUNK,
    Rows,
    check_keys,
    check_shape,
    first_rows,
    key_and_row_bytes,
    refuse_dense_optimizer,
    row_state,
    save_touched,
    write_saved,
)
from slipstream.tables.row_optimizers import RowOptimizer, State
from slipstream.tables.row_snapshot import RowBuffers, RowSnapshot, Snapshots
from slipstream.tables.slices import Placement
from slipstream.tables.updated_rows import UpdatedRows

READERS = 16


class ReadThrottle:
    """Limits reads to `rate` a second by waiting: it imitates a slower disk, for experiments."""

    def __init__(self, rate: float) -> None:
        if rate <= 0:
            raise ValueError(f"read_rate must be positive, got {rate}")
        self._rate, self._free, self._lock = rate, 0.0, threading.Lock()

    def wait(self, reads: int) -> None:
        """Wait until a disk of this rate would have served so many more reads."""
        with self._lock:
            self._free = max(self._free, time.monotonic()) + reads / self._rate
            until = self._free
        time.sleep(max(0.0, until - time.monotonic()))


class DiskTable:
    """Rows 0 … num_rows - 1 of width `dim` in the files of `directory`.

    With a `placement` it holds only the rows that `rank` owns. A `numbered` table (the storage of a
    hashed table) may grow and is not divided into slices.
    """

    def __init__(
        self,
        name: str,
        num_rows: int,
        dim: int,
        optimizer: RowOptimizer,
        directory: str | Path,
        *,
        cache_bytes: int = 1 << 30,
        seed: int = 0,
        init_scale: float = 0.035,
        dtype: torch.dtype = torch.float32,
        placement: Placement | None = None,
        rank: int = 0,
        readers: int = READERS,
        read_rate: float | None = None,
        numbered: bool = False,
    ) -> None:
        check_shape(name, num_rows, dim)
        if readers < 1:
            raise ValueError(f"readers must be at least 1, got {readers}")
        refuse_dense_optimizer(name, optimizer, "disk")
        self.name, self.dim, self.optimizer, self.dtype = name, dim, optimizer, dtype
        self.seed, self.init_scale, self.readers, self.forgets = seed, init_scale, readers, False
        self.read_by_several = True
        self._format = RecordFormat(optimizer, dim, dtype)
        placement = placement or Placement(1)
        self._numbering: Numbering = (
            PlainNumbering(num_rows)
            if numbered
            else SliceNumbering(num_rows, self._format.bytes, placement, rank)
        )
        self._cache = RowCache(name, cache_bytes, self._format.bytes, optimizer, dim, dtype)
        self._files = RecordFiles(
            Path(directory),
            self._describe() | ({} if numbered else {"num_rows": num_rows}),
            self._format.bytes,
            self._numbering.first_of_file,
            self._numbering.names,
            self._numbering.count,
        )
        self.num_rows = max(num_rows, self._files.records) if numbered else num_rows
        if numbered:
            self._numbering.count = self.num_rows
        self._updated = UpdatedRows(self._numbering.count)
        self._throttle = None if read_rate is None else ReadThrottle(read_rate)
        self._lock = threading.RLock()
        self._snapshots = Snapshots(self._lock)
        # Counts the writes of dirty rows: rows read before the last one may be out of date.
        self._written_back = 0
        self.counters = {"hits": 0, "reads": 0, "initialized": 0, "written": 0}

    def _describe(self) -> dict[str, Any]:
        """Return what the manifest must agree with when the table is opened again."""
        return {
            "name": self.name,
            "dim": self.dim,
            "dtype": str(self.dtype).removeprefix("torch."),
            "optimizer": self.optimizer.name,
            "seed": self.seed,
            "init_scale": self.init_scale,
            "layout": self._numbering.layout,
            "slices": [self._numbering.low, self._numbering.high],
        }

    @property
    def record_bytes(self) -> int:
        """Return the bytes of a row with its state."""
        return self._format.bytes

    @property
    def cache_rows(self) -> int:
        """Return how many rows the cache can hold."""
        return self._cache.capacity

    # -- what every table offers --

    def gather(self, keys_U: torch.Tensor) -> torch.Tensor:
        """Copy the weights of these rows, and keep the rows in the cache if they fit."""
        check_keys(self.name, self.num_rows, keys_U)
        unique_U, inverse_U = unique_keys(keys_U)
        keep = unique_U.numel() <= self._cache.capacity // 2
        weights_UD = self._fetch(unique_U, keep=keep).weights_UD
        in_order = unique_U.numel() == keys_U.numel() and torch.equal(unique_U, keys_U)
        return weights_UD if in_order else weights_UD[inverse_U]

    def peek(self, keys_U: torch.Tensor) -> torch.Tensor:
        """Copy the weights of these rows; the cache stays as it is, and so does what leaves it."""
        check_keys(self.name, self.num_rows, keys_U)
        return self._fetch(keys_U, keep=False, counts_as_use=False).weights_UD

    def read(self, keys_U: torch.Tensor) -> Rows:
        """Copy rows with their state; rows that are not in the cache do not enter it."""
        check_keys(self.name, self.num_rows, keys_U)
        return self._fetch(keys_U, keep=False)

    def apply(self, keys_U: torch.Tensor, grads_UD: torch.Tensor, lr: float) -> None:
        """Make one optimizer step for the rows `keys_U` (unique, ascending)."""
        check_keys(self.name, self.num_rows, keys_U)
        step = max(1, self._cache.capacity // 2)
        for keys, grads in zip(keys_U.split(step), grads_UD.split(step), strict=True):
            with self._lock:
                self._snapshots.wait_for_room()
                numbers_U = self._numbering.numbers_of(keys)
                slots = self._cached_slots(keys, numbers_U)
                self._snapshots.keep(numbers_U, keys)
                order = slots.argsort()
                self.optimizer.update_(
                    self._cache.weights_CD, self._cache.state, slots[order], grads[order], lr
                )
                self._cache.dirty_C[slots] = True

    def write(self, keys_U: torch.Tensor, rows: Rows) -> None:
        """Replace rows and their state in the cache; eviction or a flush writes them to files."""
        check_keys(self.name, self.num_rows, keys_U)
        step = max(1, self._cache.capacity // 2)
        for start in range(0, keys_U.numel(), step):
            part = slice(start, start + step)
            with self._lock:
                self._snapshots.wait_for_room()
                numbers_U = self._numbering.numbers_of(keys_U[part])
                self._snapshots.keep(numbers_U, keys_U[part])
                slots = self._cached_slots(keys_U[part], numbers_U, load=False)
                state = {entry: rows.state[entry][part] for entry in self._cache.state}
                self._cache.put(slots, Rows(rows.weights_UD[part], state))
                self._cache.dirty_C[slots] = True

    def all_rows(self) -> torch.Tensor:
        """Copy every row's weights; the copy is as large as the weights of the whole table."""
        if self._numbering.high - self._numbering.low < Placement(1).slices(0)[1]:
            raise ValueError(
                f"table '{self.name}' holds a part of its rows on this rank; ask all ranks for "
                "theirs"
            )
        weights_ND = torch.empty(self.num_rows, self.dim, dtype=self.dtype)
        for start in range(0, self.num_rows, CHUNK):
            keys = torch.arange(start, min(start + CHUNK, self.num_rows))
            weights_ND[start : start + CHUNK] = self.peek(keys)
        return weights_ND

    def touched(self, chunk: int = CHUNK) -> Iterator[tuple[torch.Tensor, Rows]]:
        """Yield every row that was ever updated or written, ascending by (slice, key)."""
        with self._lock:
            cached = self._cache.numbers(self._cache.dirty_slots())
        for begin, end in ranges(self._numbering.count):
            with self._lock:
                numbers = np.union1d(
                    self._files.all_written(begin, end), cached[(cached >= begin) & (cached < end)]
                )
            if len(numbers):
                keys_U = self._numbering.keys_of(begin, end)[torch.from_numpy(numbers - begin)]
                for part in keys_U.split(chunk):
                    yield part, self.read(part)

    @property
    def num_updated(self) -> int:
        """How many rows changed since `mark_saved` or a snapshot (or ever)."""
        return self._updated.count

    def mark_saved(self) -> None:
        """Forget which rows changed: a checkpoint holds them."""
        self._updated.take()

    def snapshot(self, *, whole: bool, most_bytes: int) -> RowSnapshot:
        """Take the rows that changed since `mark_saved`, or all ever written, as saved."""
        with self._lock:
            marks_N = self._updated.take()
            if whole:
                marks_N = np.zeros(self._numbering.count, dtype=bool)
                for begin, end in ranges(self._numbering.count):
                    marks_N[self._files.all_written(begin, end)] = True
                marks_N[self._cache.numbers(self._cache.dirty_slots())] = True
            return self._snapshots.take(self, marks_N, most_bytes)

    @property
    def row_bytes(self) -> int:
        return key_and_row_bytes(self)

    def keys_at(self, begin: int, end: int) -> torch.Tensor:
        """Return the keys of the rows numbered `begin` … `end` - 1."""
        return self._numbering.keys_of(begin, end)

    def copy_at(
        self, places_U: np.ndarray, keys_U: torch.Tensor, buffers: RowBuffers | None
    ) -> Rows:
        """Copy rows from cache and files, and leave the cache as it is."""
        return self._fetch(keys_U, keep=False, counts_as_use=False)

    def flush(self) -> None:
        """Make all rows durable: the table opens with them from now on."""
        self.flush_with(None)

    def flush_with(self, companion: State | None) -> None:
        """Flush together with tensors that belong to the rows (a hashed table's index)."""
        with self._lock:
            try:
                self._write_back(self._cache.dirty_slots())
                self._files.commit(companion)
            except (OSError, SlipstreamError) as error:
                reason = error.strerror if isinstance(error, OSError) else str(error)
                raise SlipstreamError(
                    f"could not flush table '{self.name}' to {self._files.directory}: {reason}; "
                    "on disk it is as after its last flush, so make room and flush again, or "
                    "start again from there"
                ) from error

    def companion(self) -> State:
        """Return the tensors that the last flush stored together with the rows."""
        return self._files.companion()

    def clear(self) -> None:
        """Reset every row to its first value; flushed files stay until the next flush."""
        with self._lock:
            self._snapshots.check_none(self.name)
            self._cache.clear()
            self._files.forget_all()
            self._updated.take()
            self._written_back += 1

    def close(self) -> None:
        """Close the files and release the lock; rows that were not flushed are lost."""
        with self._lock:
            self._files.close()

    def grow(self, num_rows: int) -> None:
        """Add rows to a numbered table."""
        if not isinstance(self._numbering, PlainNumbering) or num_rows < self.num_rows:
            raise ValueError(
                f"table '{self.name}' can only grow, and only where its rows are numbered"
            )
        with self._lock:
            self.num_rows = self._numbering.count = num_rows
            self._updated.grow(num_rows)
            self._files.resize(num_rows)

    def state_dict(self) -> State:
        """Return all touched rows; save a table that does not fit in memory from `touched`."""
        return save_touched(self)

    def load_state_dict(self, saved: State) -> None:
        """Replace all rows by saved ones; flushed files stay until the next flush."""
        with self._lock:
            self.clear()
            write_saved(self, saved)

    # -- between cache and files --

    def _fetch(self, keys_U: torch.Tensor, *, keep: bool, counts_as_use: bool = True) -> Rows:
        """Copy rows with their state from cache and files; `keep` puts them into the cache."""
        numbers_U = self._numbering.numbers_of(keys_U)
        with self._lock:
            slots_U = self._cache.find(torch.from_numpy(numbers_U))
            hit_U = slots_U >= 0
            if counts_as_use:
                self._cache.clock += 1
                self._cache.use(slots_U[hit_U])
            found = self._cache.rows(slots_U[hit_U])
            seen = self._written_back
            self.counters["hits"] += len(found.weights_UD)
        if bool(hit_U.all()):
            return found
        missing_U = ~hit_U
        loaded = self._load(keys_U[missing_U], numbers_U[missing_U.numpy()])
        if keep:
            self._keep(numbers_U[missing_U.numpy()], loaded, seen)
        return _merge(hit_U, found, loaded)

    def _load(self, keys_U: torch.Tensor, numbers_U: np.ndarray) -> Rows:
        """Read rows from the files; rows that were never written have their first values."""
        written_U = self._files.written(numbers_U)
        count = int(np.count_nonzero(written_U))
        with self._lock:
            self.counters["reads"] += count
            self.counters["initialized"] += len(numbers_U) - count
        if not count:
            return self._first_values(keys_U)
        if count == len(numbers_U):
            return self._read(numbers_U)
        stored_U = torch.from_numpy(written_U)
        return _merge(
            stored_U, self._read(numbers_U[written_U]), self._first_values(keys_U[~stored_U])
        )

    def _read(self, numbers_U: np.ndarray) -> Rows:
        """Read rows that are in the files, in the order of the numbers."""
        order_U = np.argsort(numbers_U)  # ascending on disk
        records = self._files.read(numbers_U[order_U], self.readers)
        if self._throttle is not None:
            self._throttle.wait(len(order_U))
        places_U = np.empty_like(order_U)
        places_U[order_U] = np.arange(len(order_U))
        return self._format.unpack(gather_rows(records, torch.from_numpy(places_U)))

    def _first_values(self, keys_U: torch.Tensor) -> Rows:
        weights_UD = first_rows(self.seed, self.name, keys_U, self.dim, self.init_scale, self.dtype)
        return Rows(weights_UD, row_state(self.optimizer, self.dim, self.dtype, keys_U.numel()))

    def _keep(self, numbers_U: np.ndarray, rows: Rows, seen: int) -> None:
        """Put loaded rows into the cache, unless another thread has written rows meanwhile."""
        with self._lock:
            if self._written_back != seen:
                return
            absent_U = self._cache.find(torch.from_numpy(numbers_U)) < 0
            self._make_room(int(absent_U.sum()))
            slots = self._cache.allocate(torch.from_numpy(numbers_U)[absent_U])
            state = {entry: value[absent_U] for entry, value in rows.state.items()}
            self._cache.put(slots, Rows(rows.weights_UD[absent_U], state))

    def _cached_slots(
        self, keys_U: torch.Tensor, numbers_U: np.ndarray, *, load: bool = True
    ) -> torch.Tensor:
        """Bring rows into the cache, to update them; without `load` new slots stay unset."""
        self._updated.mark(torch.from_numpy(numbers_U))
        self._cache.clock += 1
        slots_U = self._cache.find(torch.from_numpy(numbers_U))
        self._cache.use(slots_U[slots_U >= 0])
        new_U = slots_U < 0
        if bool(new_U.any()):
            new_numbers = numbers_U[new_U.numpy()]
            self._make_room(len(new_numbers))
            rows = self._load(keys_U[new_U], new_numbers) if load else None
            slots_U[new_U] = self._cache.allocate(torch.from_numpy(new_numbers))
            if rows is not None:
                self._cache.put(slots_U[new_U], rows)
        return slots_U

    def _make_room(self, needed: int) -> None:
        evicted = self._cache.choose_evicted(needed)
        if evicted.numel():
            try:
                self._write_back(evicted[self._cache.dirty_C[evicted]])
            except OSError as error:
                raise SlipstreamError(
                    f"could not write rows of table '{self.name}' to {self._files.directory}: "
                    f"{error.strerror}; "
                    "on disk it is as after its last flush, so make room and start again from there"
                ) from error
            self._cache.release(evicted)

    def _write_back(self, slots_U: torch.Tensor) -> None:
        """Write dirty rows to the files; they stay in the cache and are clean."""
        for slots in slots_U.split(CHUNK) if slots_U.numel() else ():
            slots = slots[torch.from_numpy(np.argsort(self._cache.numbers(slots)))]
            self._files.write(
                self._cache.numbers(slots), self._format.pack(self._cache.rows(slots)), self.readers
            )
            self._cache.dirty_C[slots] = False
            self._written_back += 1
            self.counters["written"] += slots.numel()


def _merge(hit_U: torch.Tensor, found: Rows, loaded: Rows) -> Rows:
    """Join rows found in the cache and rows loaded, in the order of the keys."""

    hits, misses = hit_U.nonzero().squeeze(1), (~hit_U).nonzero().squeeze(1)

    def joined(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        whole = b.new_empty(hit_U.numel(), *b.shape[1:])
        return whole.index_copy_(0, hits, a).index_copy_(0, misses, b)

    state = {entry: joined(value, loaded.state[entry]) for entry, value in found.state.items()}
    return Rows(joined(found.weights_UD, loaded.weights_UD), state)
