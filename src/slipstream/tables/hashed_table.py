"""A table for any int64 id. Touch this when admission or eviction of ids changes.

An index maps an id to a numbered row of another table (memory or disk), which grows as needed. An
id gets a row with the `admit_after`-th training step that has a gradient for it; before that, reads
return its first value and its gradients are dropped. With `max_rows`, the least recently (lru) or
least often (lfu) trained rows are evicted; an evicted id starts again from its first value, and its
sightings from zero.

Only `apply` and `write` count as use, never `gather` or `read`. So the training steps alone decide
which ids have a row: prefetching or evaluating cannot change it.
"""

import threading
from collections.abc import Callable, Iterator
from typing import Literal, Protocol

import numpy as np
import torch

from slipstream.errors import SlipstreamError
from slipstream.tables.embedding_table import (
    CHUNK,
    EmbeddingTable,
    Rows,
    check_keys,
    first_rows,
    key_and_row_bytes,
    refuse_dense_optimizer,
    row_state,
    save_touched,
    write_saved,
)
from slipstream.tables.eviction import SHARE, smallest
from slipstream.tables.hash_index import make_index
from slipstream.tables.row_optimizers import RowOptimizer, State
from slipstream.tables.row_snapshot import RowBuffers, RowSnapshot, Snapshots
from slipstream.tables.slices import slice_order
from slipstream.tables.updated_rows import UpdatedRows

Evict = Literal["lru", "lfu"]
# State of a row besides the optimizer's: the step that last trained its id, and how many have.
SEEN, SIGHTINGS = "tier.seen", "tier.sightings"
_SIGHTING_BITS = 8
MOST_SIGHTINGS = (1 << _SIGHTING_BITS) - 1
_FIRST_ROOM = 1024
_MOST_PARTS = 64  # lists of evicted ids that are kept before they are joined


class GrowableTable(EmbeddingTable, Protocol):
    """A table of numbered rows that can grow: the storage of a hashed table."""

    @property
    def seed(self) -> int: ...

    @property
    def init_scale(self) -> float: ...

    def grow(self, num_rows: int) -> None: ...

    def copy_at(
        self, places_U: np.ndarray, keys_U: torch.Tensor, buffers: RowBuffers | None
    ) -> Rows: ...

    def companion(self) -> State:
        """Return the tensors flushed together with the rows; empty for a new table."""
        ...

    def flush_with(self, companion: State) -> None:
        """Make the rows and the tensors in `companion` durable together."""
        ...


class HashedTable:
    """Rows for any id, kept in the numbered rows of `storage`."""

    _clock: int  # training steps so far
    _next: int  # rows of the storage used so far

    def __init__(
        self,
        storage: GrowableTable,
        *,
        num_rows: int | None = None,
        admit_after: int = 1,
        max_rows: int | None = None,
        evict: Evict = "lru",
        max_candidates: int = 1 << 20,
    ) -> None:
        if not 1 <= admit_after <= MOST_SIGHTINGS:
            raise ValueError(
                f"admit_after must be between 1 and {MOST_SIGHTINGS}, got {admit_after}"
            )
        if max_rows is not None and max_rows < 1:
            raise ValueError(f"max_rows must be at least 1, got {max_rows}")
        if evict not in ("lru", "lfu"):
            raise ValueError(f"evict must be lru or lfu, got {evict!r}")
        refuse_dense_optimizer(storage.name, storage.optimizer, "hashed")
        self.storage, self.num_rows = storage, num_rows
        self.admit_after, self.max_rows, self.evict = admit_after, max_rows, evict
        self.max_candidates = max_candidates
        self._lock = threading.RLock()
        self._snapshots = Snapshots(self._lock)
        self._forget_all()
        if saved := storage.companion():
            self._restore(saved)

    @property
    def name(self) -> str:
        return self.storage.name

    @property
    def dim(self) -> int:
        return self.storage.dim

    @property
    def optimizer(self) -> RowOptimizer:
        return self.storage.optimizer

    @property
    def dtype(self) -> torch.dtype:
        return self.storage.dtype

    @property
    def forgets(self) -> bool:
        """Return whether a trained row may later be read as new: with admission or eviction."""
        return self.admit_after > 1 or self.max_rows is not None

    @property
    def read_by_several(self) -> bool:
        return False

    def __len__(self) -> int:
        """Return the number of ids that have a row."""
        return len(self._index)

    def gather(self, keys_U: torch.Tensor) -> torch.Tensor:
        """Copy the weights of these ids; ids without a row have their first values."""
        return self._weights(keys_U, self.storage.gather)

    def peek(self, keys_U: torch.Tensor) -> torch.Tensor:
        """Copy the weights of these ids as `gather` does, past the storage's cache."""
        return self._weights(keys_U, self.storage.peek)

    def _weights(
        self, keys_U: torch.Tensor, read: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        check_keys(self.name, self.num_rows, keys_U)
        with self._lock:
            slots_U = self._index.find(keys_U)
            known_U = slots_U >= 0
            if bool(known_U.all()):
                return read(slots_U)
            weights_UD = torch.empty(keys_U.numel(), self.dim, dtype=self.dtype)
            weights_UD[known_U] = read(slots_U[known_U])
            weights_UD[~known_U] = self._first_rows(keys_U[~known_U])
            return weights_UD

    def read(self, keys_U: torch.Tensor) -> Rows:
        """Copy rows with their optimizer state; ids without a row have their first values."""
        check_keys(self.name, self.num_rows, keys_U)
        with self._lock:
            slots_U = self._index.find(keys_U)
            known_U = slots_U >= 0
            found = self.storage.read(slots_U[known_U])
            rows = self._first_values(keys_U)
            rows.weights_UD[known_U] = found.weights_UD
            for entry, value in rows.state.items():
                value[known_U] = found.state[entry]
            return rows

    def apply(self, keys_U: torch.Tensor, grads_UD: torch.Tensor, lr: float) -> None:
        """Make one optimizer step for those of these ids (unique, ascending) that have a row.

        Ids that are seen for the `admit_after`-th time get a row first.
        """
        check_keys(self.name, self.num_rows, keys_U)
        with self._lock:
            slots_U = self._begin_change(keys_U)
            new_U = (slots_U < 0).nonzero().squeeze(1)
            new_U = new_U[self._count_sightings(keys_U[new_U])]
            slots_U[new_U] = self._admit(keys_U[new_U])
            served_U = (slots_U >= 0).nonzero().squeeze(1)
            served_U = served_U[slots_U[served_U].argsort()]
            self._updated.mark(slots_U[served_U])
            self.storage.apply(slots_U[served_U], grads_UD[served_U], lr)

    def write(self, keys_U: torch.Tensor, rows: Rows) -> None:
        """Replace rows and their state; ids without a row get one at once."""
        check_keys(self.name, self.num_rows, keys_U)
        with self._lock:
            slots_U = self._begin_change(keys_U)
            new_U = slots_U < 0
            self._candidates.erase(keys_U[new_U])
            # Loading a saved table evicts nothing; the next step that admits ids makes room.
            slots_U[new_U] = self._admit(
                keys_U[new_U], initialize=False, evicts=SEEN not in rows.state
            )
            state = {
                entry: rows.state[entry]
                for entry in row_state(self.optimizer, self.dim, self.dtype)
            }
            self.storage.write(slots_U, Rows(rows.weights_UD, state))
            self._updated.mark(slots_U)
            if SEEN in rows.state and slots_U.numel():  # the rows of a saved hashed table
                self._seen_S[slots_U] = rows.state[SEEN]
                self._sightings_S[slots_U] = rows.state[SIGHTINGS]
                self._clock = max(self._clock, int(rows.state[SEEN].max()))

    def all_rows(self) -> torch.Tensor:
        """Copy the weights of ids 0 … num_rows - 1, if `num_rows` is known."""
        if self.num_rows is None:
            raise ValueError(f"table '{self.name}' has a row for every id; ask for those you need")
        return self.gather(torch.arange(self.num_rows))

    def touched(self, chunk: int = CHUNK) -> Iterator[tuple[torch.Tensor, Rows]]:
        """Yield every id that has a row, ascending by (slice, id); state includes sightings."""
        ids_U, slots_U = self._index.items()
        order = slice_order(ids_U)
        for part in order.split(chunk):
            if part.numel():
                rows = self.storage.read(slots_U[part])
                yield ids_U[part], self._with_past(slots_U[part].numpy(), rows)

    @property
    def num_updated(self) -> int:
        """How many rows changed since `mark_saved` or a snapshot (or ever)."""
        return self._updated.count

    def removed(self) -> torch.Tensor:
        """Return the ids evicted since `mark_saved` or a snapshot that have no row now."""
        nothing = torch.zeros(0, dtype=torch.int64)
        ids_V: torch.Tensor = torch.cat([nothing, *self._evicted]).unique()
        return ids_V[self._index.find(ids_V) < 0]

    def mark_saved(self) -> None:
        """Forget which rows changed and which ids lost theirs: a checkpoint holds that."""
        self._updated.take()
        self._evicted.clear()

    def snapshot(self, *, whole: bool, most_bytes: int) -> RowSnapshot:
        """Take the rows that changed since `mark_saved`, or those of all ids, as saved."""
        with self._lock:
            has_row_S = self._ids_S.numpy() >= 0
            marks_S = self._updated.take()[: len(has_row_S)] & has_row_S
            self._evicted.clear()
            return self._snapshots.take(self, has_row_S if whole else marks_S, most_bytes)

    @property
    def row_bytes(self) -> int:
        return key_and_row_bytes(self) + 16  # with the past of an id

    def keys_at(self, begin: int, end: int) -> torch.Tensor:
        """Return the ids of the rows in slots `begin` … `end` - 1."""
        return self._ids_S[begin:end].clone()

    def copy_at(
        self, places_U: np.ndarray, keys_U: torch.Tensor, buffers: RowBuffers | None
    ) -> Rows:
        """Copy rows by slot, with the past of their ids."""
        rows = self.storage.copy_at(places_U, torch.from_numpy(places_U), buffers)
        return self._with_past(places_U, rows)

    def _with_past(self, slots_U: np.ndarray, rows: Rows) -> Rows:
        past = {
            name: torch.from_numpy(value_S.numpy()[slots_U])
            for name, value_S in ((SEEN, self._seen_S), (SIGHTINGS, self._sightings_S))
        }
        return Rows(rows.weights_UD, {**rows.state, **past})

    def flush(self) -> None:
        """Make rows and index durable together, if the storage has files."""
        with self._lock:
            self.storage.flush_with(self._saved_index())

    def clear(self) -> None:
        """Remove every row and every sighting."""
        with self._lock:
            self._snapshots.check_none(self.name)
            self._forget_all()
            self.storage.clear()

    def close(self) -> None:
        """Close the storage, without flushing."""
        self.storage.close()

    def state_dict(self) -> State:
        """Return the rows of all ids that have one, and the sightings of the others."""
        return {**save_touched(self), **self.admission()}

    def load_state_dict(self, saved: State) -> None:
        """Replace all rows by saved ones; those of another kind of table are refused."""
        with self._lock:
            self.clear()
            write_saved(self, saved)
            if "clock" in saved:
                self.load_admission(saved)

    def admission(self) -> State:
        """Return what decides when ids get a row: the ids that wait, their sightings, the clock."""
        with self._lock:
            ids, packed = self._candidates.items()
            return {
                "candidates": ids,
                "candidate_sightings": packed,
                "clock": torch.tensor(self._clock),
            }

    def load_admission(self, saved: State) -> None:
        """Add ids that wait for a row; the clock is the latest one loaded."""
        with self._lock:
            self._candidates.insert(saved["candidates"], saved["candidate_sightings"])
            self._clock = int(saved["clock"])

    # -- which ids have a row --

    def _forget_all(self) -> None:
        none = torch.zeros(0, dtype=torch.int64)
        self._index, self._candidates = make_index(), make_index()
        self._clock, self._next = 0, 0
        self._free_S: torch.Tensor = none  # rows of evicted ids
        self._ids_S: torch.Tensor = none  # the id of each row, -1 if it is free
        self._seen_S: torch.Tensor = none
        self._sightings_S: torch.Tensor = none
        self._updated = UpdatedRows(0)
        self._evicted: list[torch.Tensor] = []  # ids, since the last checkpoint

    def _begin_change(self, ids_U: torch.Tensor) -> torch.Tensor:
        """Count one more change and one use of the rows there are; return the ids' slots or -1."""
        self._snapshots.wait_for_room()
        self._clock += 1
        slots_U = self._index.find(ids_U)
        used_U = slots_U[slots_U >= 0]
        self._snapshots.keep(used_U, self._ids_S[used_U])
        self._seen_S[used_U] = self._clock
        self._sightings_S[used_U] += 1
        return slots_U

    def _count_sightings(self, ids_U: torch.Tensor) -> torch.Tensor:
        """Count one sighting of ids without a row; returns which of them now get one."""
        if self.admit_after == 1:
            return torch.ones(ids_U.numel(), dtype=torch.bool)
        packed_U = self._candidates.find(ids_U)
        sightings_U = torch.where(packed_U < 0, 0, packed_U & MOST_SIGHTINGS) + 1
        admitted_U = sightings_U >= self.admit_after
        self._candidates.erase(ids_U[admitted_U])
        waiting = ~admitted_U
        self._candidates.insert(
            ids_U[waiting], (self._clock << _SIGHTING_BITS) | sightings_U[waiting]
        )
        excess = len(self._candidates) - self.max_candidates
        if excess > 0:  # the longest unseen are forgotten
            ids, packed = (x.numpy() for x in self._candidates.items())
            oldest = smallest(
                max(excess, self.max_candidates // SHARE), packed >> _SIGHTING_BITS, ids
            )
            self._candidates.erase(torch.from_numpy(ids[oldest]))
        return admitted_U

    def _admit(
        self, ids_U: torch.Tensor, *, initialize: bool = True, evicts: bool = True
    ) -> torch.Tensor:
        """Give rows to new ids; beyond `max_rows`, evict the least useful rows of earlier steps."""
        count = ids_U.numel()
        if count == 0:
            return ids_U
        if evicts and self.max_rows is not None and len(self._index) + count > self.max_rows:
            self._make_room(len(self._index) + count - self.max_rows)
        slots_U = self._take_slots(count)
        self._index.insert(ids_U, slots_U)
        self._ids_S[slots_U], self._seen_S[slots_U] = ids_U, self._clock
        self._sightings_S[slots_U] = 1
        if initialize:
            self.storage.write(slots_U, self._first_values(ids_U))
        return slots_U

    def _make_room(self, needed: int) -> None:
        assert self.max_rows is not None
        slots_V = ((self._ids_S >= 0) & (self._seen_S < self._clock)).nonzero().squeeze(1)
        if slots_V.numel() < needed:
            raise SlipstreamError(
                f"one step needs more rows of table '{self.name}' than the {self.max_rows} that "
                "a rank may keep; raise tables.max_rows"
            )
        seen, ids = self._seen_S[slots_V].numpy(), self._ids_S[slots_V].numpy()
        order = (
            (seen, ids) if self.evict == "lru" else (self._sightings_S[slots_V].numpy(), seen, ids)
        )
        victims = slots_V[torch.from_numpy(smallest(max(needed, self.max_rows // SHARE), *order))]
        self._snapshots.keep(victims, self._ids_S[victims])
        self._evicted.append(self._ids_S[victims])
        self._index.erase(self._ids_S[victims])
        if len(self._evicted) > _MOST_PARTS:
            self._evicted = [self.removed()]
        self._ids_S[victims] = -1
        self._free_S = torch.cat([self._free_S, victims])

    def _take_slots(self, count: int) -> torch.Tensor:
        """Return unused rows: free ones first, then new ones, for which the storage grows."""
        reused, self._free_S = self._free_S[:count], self._free_S[count:]
        fresh = torch.arange(self._next, self._next + count - reused.numel())
        self._next += fresh.numel()
        self._extend(self._next)
        return torch.cat([reused, fresh])

    def _extend(self, needed: int) -> None:
        stored = self.storage.num_rows or 0
        if needed > stored:
            self.storage.grow(max(needed, _FIRST_ROOM, 2 * stored))
        if needed > len(self._ids_S):
            more = torch.full(
                (max(needed, _FIRST_ROOM, 2 * len(self._ids_S)) - len(self._ids_S),),
                -1,
                dtype=torch.int64,
            )
            self._ids_S, self._seen_S, self._sightings_S = (
                torch.cat([x, more]) for x in (self._ids_S, self._seen_S, self._sightings_S)
            )
            self._updated.grow(len(self._ids_S))

    def _first_rows(self, ids_U: torch.Tensor) -> torch.Tensor:
        return first_rows(
            self.storage.seed, self.name, ids_U, self.dim, self.storage.init_scale, self.dtype
        )

    def _first_values(self, ids_U: torch.Tensor) -> Rows:
        state = row_state(self.optimizer, self.dim, self.dtype, ids_U.numel())
        return Rows(self._first_rows(ids_U), state)

    # -- the index on disk --

    def _saved_index(self) -> State:
        return {
            "ids": self._ids_S[: self._next],
            "seen": self._seen_S[: self._next],
            "sightings": self._sightings_S[: self._next],
            **self.admission(),
        }

    def _restore(self, saved: State) -> None:
        self._next, self._clock = len(saved["ids"]), int(saved["clock"])
        self._ids_S, self._seen_S, self._sightings_S = (
            saved[name].clone() for name in ("ids", "seen", "sightings")
        )
        used = (self._ids_S >= 0).nonzero().squeeze(1)
        self._updated.grow(self._next)
        self._updated.mark(used)
        self._index.insert(self._ids_S[used], used)
        self._free_S = (self._ids_S < 0).nonzero().squeeze(1)
        self._candidates.insert(saved["candidates"], saved["candidate_sightings"])
