"""Rows of a table as they were at one moment, read while steps go on updating the table.

Taking a snapshot copies no row, only marks of the rows that belong to it. Before a table changes
rows it calls `Snapshots.keep`, which copies those that were not read yet. `RowSnapshot.pieces`
reads the others without the table's lock; it takes the lock only to see which of them were kept
meanwhile. Touch this when checkpoints copy rows in another way.
"""

import math
import threading
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch

from slipstream.tables.disk_records import ranges
from slipstream.tables.embedding_table import Rows

Piece = tuple[torch.Tensor, Rows]  # keys, and their rows


class RowBuffers:
    """Memory for copied rows that is used again and again: fresh pages cost more than the copy."""

    def __init__(self) -> None:
        self._memory: dict[str, np.ndarray] = {}

    def copy(self, name: str, source: torch.Tensor, places_U: np.ndarray) -> torch.Tensor:
        """Copy these rows of `source`, on this thread alone; `name` says which memory to use."""
        rows = _bytes_of(source)
        size = len(places_U) * rows.shape[1]
        if name not in self._memory or len(self._memory[name]) < size:
            self._memory[name] = np.empty(size, dtype=np.uint8)
        out = self._memory[name][:size].reshape(len(places_U), rows.shape[1])
        if len(places_U) and places_U[-1] - places_U[0] + 1 == len(places_U):  # no gaps
            np.copyto(out, rows[places_U[0] : places_U[-1] + 1])
        else:
            np.take(rows, places_U, axis=0, out=out, mode="clip")
        copied = torch.from_numpy(out.reshape(-1)).view(source.dtype)
        return copied.view(len(places_U), *source.shape[1:])


def _bytes_of(rows: torch.Tensor) -> np.ndarray:
    """Return rows as bytes [N, bytes of a row], not copied."""
    width = math.prod(rows.shape[1:]) * rows.element_size()
    as_bytes: np.ndarray = rows.detach().reshape(-1).view(torch.uint8).numpy().reshape(-1, width)
    return as_bytes


class SnapshotTable(Protocol):
    """A table as its snapshots read it: rows by place."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a key, its row and its state."""
        ...

    def keys_at(self, begin: int, end: int) -> torch.Tensor:
        """Return the keys of places `begin` … `end` - 1."""
        ...

    def copy_at(
        self, places_U: np.ndarray, keys_U: torch.Tensor, buffers: RowBuffers | None
    ) -> Rows:
        """Copy rows by place (ascending), into `buffers` if there are some. Needs no lock."""
        ...


class RowSnapshot:
    """The marked rows of a table; `pieces` yields each once, as it was at the beginning."""

    def __init__(
        self, source: SnapshotTable, marks_N: np.ndarray, lock: threading.RLock, most_bytes: int
    ) -> None:
        self.count = int(np.count_nonzero(marks_N))
        self.num_bytes = self.count * source.row_bytes
        self._source, self._marks_N = source, marks_N
        self._lock, self._room = lock, threading.Condition(lock)
        self._most, self._kept, self._kept_bytes = most_bytes, list[Piece](), 0
        self.closed = not self.count

    def keep(self, places_U: np.ndarray, keys_U: torch.Tensor) -> None:
        """Copy those of these rows that were not read yet; the table is about to change them."""
        if self.closed or not len(places_U):
            return
        waiting_U = self._marks_N.take(places_U, mode="clip") & (places_U < len(self._marks_N))
        if not waiting_U.any():
            return
        order = np.flatnonzero(waiting_U)
        order = order[np.argsort(places_U[order], kind="stable")]
        kept_U, keys_U = places_U[order], keys_U[torch.from_numpy(order)]
        self._kept.append((keys_U, self._source.copy_at(kept_U, keys_U, None)))
        self._kept_bytes += len(kept_U) * self._source.row_bytes
        self._marks_N[kept_U] = False

    def wait_for_room(self) -> None:
        """Wait while too many kept rows fill the memory; gives up the table's lock meanwhile."""
        self._room.wait_for(lambda: self.closed or self._kept_bytes <= self._most)

    def pieces(self, piece_bytes: int) -> Iterator[Piece]:
        """Yield all rows, about so many bytes at a time, in any order.

        A piece is valid until the next one is asked for: its memory is used again.
        """
        buffers, rows = RowBuffers(), max(1, piece_bytes // self._source.row_bytes)
        try:
            for begin, end in ranges(len(self._marks_N)):
                # A copy: `keep` clears marks meanwhile, and nonzero counts before it fills.
                found_U = np.flatnonzero(self._marks_N[begin:end].copy())
                keys_S = self._source.keys_at(begin, end).numpy() if len(found_U) else None
                for first in range(0, len(found_U), rows):
                    part_U = found_U[first : first + rows]
                    assert keys_S is not None
                    keys_U = torch.from_numpy(keys_S[part_U])
                    copied = self._source.copy_at(part_U + begin, keys_U, buffers)
                    yield from self._not_kept(part_U + begin, keys_U, copied)
                    if self._kept and self._kept_bytes >= min(piece_bytes, self._most):
                        yield self._take_kept()
            while self._kept:
                yield self._take_kept()
        finally:
            self.close()

    def close(self) -> None:
        """Nobody reads it any more: the table need not keep rows for it."""
        with self._lock:
            self.closed, self._kept, self._kept_bytes = True, [], 0
            self._room.notify_all()

    def _not_kept(self, places_U: np.ndarray, keys_U: torch.Tensor, rows: Rows) -> Iterator[Piece]:
        """Yield the rows that nobody has kept, and so nobody has changed, since the beginning."""
        with self._lock:
            gone_U = ~self._marks_N[places_U]
            self._marks_N[places_U] = False
        left = len(gone_U) - int(np.count_nonzero(gone_U))
        if left < len(gone_U):  # rows from the end fill the gaps
            gaps, last = np.flatnonzero(gone_U[:left]), left + np.flatnonzero(~gone_U[left:])
            for tensor in (keys_U, rows.weights_UD, *rows.state.values()):
                as_bytes = _bytes_of(tensor)
                as_bytes[gaps] = as_bytes[last]
        if left:
            state = {name: value[:left] for name, value in rows.state.items()}
            yield keys_U[:left], Rows(rows.weights_UD[:left], state)

    def _take_kept(self) -> Piece:
        """Return the rows kept so far, joined, and make room for more."""
        with self._lock:
            kept, self._kept, self._kept_bytes = self._kept, [], 0
            self._room.notify_all()
        state = {
            name: torch.cat([rows.state[name] for _, rows in kept]) for name in kept[0][1].state
        }
        weights_UD = torch.cat([rows.weights_UD for _, rows in kept])
        return torch.cat([keys for keys, _ in kept]), Rows(weights_UD, state)


class Snapshots:
    """The snapshots of one table that are being read; the table holds its lock around each call."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock, self._open = lock, list[RowSnapshot]()

    def take(self, source: SnapshotTable, marks_N: np.ndarray, most_bytes: int) -> RowSnapshot:
        """Take a snapshot of the marked rows, of which at most so many bytes may be kept."""
        snapshot = RowSnapshot(source, marks_N, self._lock, most_bytes)
        self._open = [each for each in (*self._open, snapshot) if not each.closed]
        return snapshot

    def wait_for_room(self) -> None:
        """Wait until rows may be kept, before an update begins."""
        for each in self._open:
            each.wait_for_room()

    def keep(self, places_U: torch.Tensor | np.ndarray, keys_U: torch.Tensor) -> None:
        """Copy rows that are about to change, where a snapshot has not read them yet."""
        for each in self._open:
            if not each.closed:
                places = places_U.numpy() if isinstance(places_U, torch.Tensor) else places_U
                each.keep(places, keys_U)

    def check_none(self, table: str) -> None:
        """Raise where rows of the table are still to be read as they are."""
        if not all(each.closed for each in self._open):
            raise RuntimeError(f"table '{table}' is being saved; wait before replacing its rows")
