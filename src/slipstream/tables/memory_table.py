"""A table in this process's memory. Touch this when that storage changes.

Creating a table uses no memory: its pages are mapped but not touched, a row gets its first value
when it is first used, and one bit per row records that. A rank that owns a part of the slices
stores only that part. An optimizer that updates untouched rows initializes all rows at once.
"""

import threading
from collections.abc import Iterator

import numpy as np
import torch

from slipstream.errors import SlipstreamError
from slipstream.ops.row_gather import gather_present, gather_rows
from slipstream.tables.embedding_table import (
    CHUNK,
    Rows,
    check_keys,
    check_shape,
    first_rows,
    key_and_row_bytes,
    save_touched,
    write_saved,
)
from slipstream.tables.memory_marks import RowMarks
from slipstream.tables.memory_pages import lazy_zeros
from slipstream.tables.row_optimizers import RowOptimizer, State
from slipstream.tables.row_snapshot import RowBuffers, RowSnapshot, Snapshots
from slipstream.tables.slices import Placement, SliceLayout, slice_order
from slipstream.tables.updated_rows import UpdatedRows


class MemoryTable:
    """Rows 0 … num_rows - 1 of width `dim`; with a `placement` only those that `rank` owns."""

    def __init__(
        self,
        name: str,
        num_rows: int,
        dim: int,
        optimizer: RowOptimizer,
        *,
        seed: int = 0,
        init_scale: float = 0.035,
        dtype: torch.dtype = torch.float32,
        placement: Placement | None = None,
        rank: int = 0,
    ) -> None:
        check_shape(name, num_rows, dim)
        self.name, self.num_rows, self.dim = name, num_rows, dim
        self.optimizer, self.dtype = optimizer, dtype
        self.seed, self.init_scale, self.forgets = seed, init_scale, False
        self.read_by_several = False  # a read marks the rows that it creates
        part = None if placement is None or placement.world == 1 else placement.slices(rank)
        self._layout = None if part is None else SliceLayout(num_rows, *part)
        self._held = num_rows if self._layout is None else self._layout.count
        # A first value must never overwrite a row that another thread has updated meanwhile.
        self._lock = threading.RLock()
        self._snapshots = Snapshots(self._lock)
        self.clear()

    @property
    def weights_ND(self) -> torch.Tensor:
        """Return the weights of every row held here, all initialized, not copied."""
        self._initialize_all()
        return self._weights_ND

    def gather(self, keys_U: torch.Tensor) -> torch.Tensor:
        """Copy the weights of these rows."""
        if self._layout is None and keys_U.dtype == torch.int64:
            try:
                weights_UD = gather_present(
                    self._weights_ND, keys_U, None if self._all_ready else self._ready.bits
                )
            except IndexError:
                check_keys(self.name, self.num_rows, keys_U)
                raise
            if weights_UD is not None:
                return weights_UD
        check_keys(self.name, self.num_rows, keys_U)
        places_U = self._places(keys_U)
        self._initialize(keys_U, places_U)
        return gather_rows(self._weights_ND, places_U)

    def peek(self, keys_U: torch.Tensor) -> torch.Tensor:
        """Copy the weights of these rows; there is no cache."""
        return self.gather(keys_U)

    def all_rows(self) -> torch.Tensor:
        """Return every row's weights, not copied, for reading only."""
        if self._layout is not None:
            raise ValueError(
                f"table '{self.name}' holds a part of its rows on this rank; ask all ranks for "
                "theirs"
            )
        return self.weights_ND

    def apply(self, keys_U: torch.Tensor, grads_UD: torch.Tensor, lr: float) -> None:
        """Make one optimizer step for the rows `keys_U` (unique, ascending)."""
        check_keys(self.name, self.num_rows, keys_U)
        places_U = self._places(keys_U)
        with self._lock:
            self._snapshots.wait_for_room()
            self._snapshots.keep(places_U, keys_U)
            if self.optimizer.updates_untouched_rows:
                self._initialize_all()
            self._initialize(keys_U, places_U)
            self.optimizer.update_(self._weights_ND, self.state, places_U, grads_UD, lr)
            self._updated.mark(places_U)

    def read(self, keys_U: torch.Tensor) -> Rows:
        """Copy rows with their state."""
        places_U = self._places(keys_U)
        return Rows(
            self.gather(keys_U),
            {name: value[places_U] for name, value in self._row_state().items()},
        )

    def write(self, keys_U: torch.Tensor, rows: Rows) -> None:
        """Replace rows and their state."""
        check_keys(self.name, self.num_rows, keys_U)
        places_U = self._places(keys_U)
        with self._lock:
            self._snapshots.wait_for_room()
            self._snapshots.keep(places_U, keys_U)
            self._weights_ND[places_U] = rows.weights_UD
            for name, value in self._row_state().items():
                value[places_U] = rows.state[name]
            self._ready.mark(places_U)
            self._updated.mark(places_U)

    def touched(self, chunk: int = CHUNK) -> Iterator[tuple[torch.Tensor, Rows]]:
        """Yield every initialized row with its state, ascending by (slice, key)."""
        places_U = self._ready.marked()
        keys_U = places_U if self._layout is None else self._layout.keys()[places_U]
        for part in keys_U[slice_order(keys_U)].split(chunk):
            if part.numel():
                yield part, self.read(part)

    @property
    def num_updated(self) -> int:
        """How many rows changed since `mark_saved` or a snapshot (or ever)."""
        return self._updated.count

    def mark_saved(self) -> None:
        """Forget which rows changed: a checkpoint holds them."""
        self._updated.take()

    def snapshot(self, *, whole: bool, most_bytes: int) -> RowSnapshot:
        """Take the rows that changed since `mark_saved`, or that ever did, as saved."""
        with self._lock:
            return self._snapshots.take(self, self._updated.take(ever=whole), most_bytes)

    @property
    def row_bytes(self) -> int:
        return key_and_row_bytes(self)

    def keys_at(self, begin: int, end: int) -> torch.Tensor:
        """Return the keys of places `begin` … `end` - 1."""
        return torch.arange(begin, end) if self._layout is None else self._layout.keys()[begin:end]

    def copy_at(
        self, places_U: np.ndarray, keys_U: torch.Tensor, buffers: RowBuffers | None
    ) -> Rows:
        """Copy rows by place; those that are being updated meanwhile are of no use."""
        if buffers is None:
            places = torch.from_numpy(places_U)
            state = {name: value[places] for name, value in self._row_state().items()}
            return Rows(gather_rows(self._weights_ND, places), state)
        return Rows(
            buffers.copy("weights", self._weights_ND, places_U),
            {
                name: buffers.copy(f"state.{name}", value, places_U)
                for name, value in self._row_state().items()
            },
        )

    def flush(self) -> None:
        """Nothing to do: memory has no file."""

    def flush_with(self, companion: State) -> None:
        """Nothing to do: memory has no file."""

    def companion(self) -> State:
        """Return nothing: memory has no file."""
        return {}

    def clear(self) -> None:
        """Reset every row to its first value."""
        with self._lock:
            self._snapshots.check_none(self.name)
            self._weights_ND = lazy_zeros(self._held, self.dim, dtype=self.dtype)
            self.state = self.optimizer.new_state(self._held, self.dim, self.dtype, lazy_zeros)
            self._ready, self._all_ready = RowMarks(self._held), False
            self._updated = UpdatedRows(self._held)

    def close(self) -> None:
        """Nothing to do: memory has no file."""

    def grow(self, num_rows: int) -> None:
        """Make room for more rows; existing rows are copied, so callers should double the size."""
        if self._layout is not None or num_rows < self.num_rows:
            raise ValueError(
                f"table '{self.name}' can only grow, and only where it holds all its rows"
            )
        with self._lock:
            larger = self.optimizer.new_state(num_rows, self.dim, self.dtype, lazy_zeros)
            for name, value in self.state.items():
                if value.dim() > 0:
                    larger[name][: self.num_rows] = value
                else:
                    larger[name] = value
            weights_ND = lazy_zeros(num_rows, self.dim, dtype=self.dtype)
            weights_ND[: self.num_rows] = self._weights_ND
            # Complete before they are put in place: a snapshot reads without the lock.
            self._weights_ND, self.state = weights_ND, larger
            self._ready, self._all_ready = self._ready.extended(num_rows), False
            self._updated.grow(num_rows)
            self.num_rows = self._held = num_rows

    def state_dict(self) -> State:
        """Return weights and state by name, not copied: save or clone them before the next step.

        The part of a table that one rank holds also names its keys.
        """
        if self._layout is not None:
            return save_touched(self)
        return {
            "weights": self.weights_ND,
            **{f"state.{name}": value for name, value in self.state.items()},
        }

    def load_state_dict(self, saved: State) -> None:
        """Load saved weights and state; those of another kind of table are refused."""
        if self._layout is not None:
            self.clear()
            write_saved(self, saved)
            return
        mine = {
            "weights": self._weights_ND,
            **{f"state.{name}": value for name, value in self.state.items()},
        }
        rows = len(saved["weights"]) if "weights" in saved else 0  # fewer: the data grew since
        fitting = {
            name: (value.shape if value.dim() == 0 else (rows, *value.shape[1:]))
            for name, value in mine.items()
        }
        if rows > self.num_rows or fitting != {
            name: tuple(value.shape) for name, value in saved.items()
        }:
            raise SlipstreamError(
                f"the saved rows of table '{self.name}' do not fit: this table has "
                f"{self.num_rows} rows of {self.dim} "
                f"with optimizer {self.optimizer.name}; use the recipe and the store it was "
                "trained with"
            )
        if rows < self.num_rows:
            self.clear()
            self._load_first_rows(saved, rows)
            return
        for name, value in mine.items():
            value.copy_(saved[name])
        self._ready.mark_all()
        self._all_ready = True
        self._updated.mark_first(rows)

    def _load_first_rows(self, saved: State, rows: int) -> None:
        """Load the first rows of a table; the others stay as they are born."""
        self._weights_ND[:rows] = saved["weights"]
        for name, value in self.state.items():
            (value if value.dim() == 0 else value[:rows]).copy_(saved[f"state.{name}"])
        self._ready.mark(torch.arange(rows))
        self._updated.mark_first(rows)

    def _places(self, keys_U: torch.Tensor) -> torch.Tensor:
        """Return the places of the keys in this rank's storage."""
        return keys_U if self._layout is None else self._layout.locate(keys_U)

    def _row_state(self) -> State:
        return {name: value for name, value in self.state.items() if value.dim() > 0}

    def _initialize(self, keys_U: torch.Tensor, places_U: torch.Tensor) -> None:
        """Set the first values of those of these rows that have none yet."""
        if self._all_ready or not bool(self._ready.unmarked(places_U).any()):
            return
        with self._lock:
            new_U = self._ready.unmarked(places_U)
            keys_U, places_U = keys_U[new_U], places_U[new_U]
            self._weights_ND[places_U] = first_rows(
                self.seed, self.name, keys_U, self.dim, self.init_scale, self.dtype
            )
            self._ready.mark(places_U)

    def _initialize_all(self) -> None:
        if self._all_ready:
            return
        with self._lock:
            held = torch.arange(self._held)
            keys_N = held if self._layout is None else self._layout.keys()
            for start in range(0, self._held, CHUNK):
                self._initialize(keys_N[start : start + CHUNK], held[start : start + CHUNK])
            self._all_ready = True
