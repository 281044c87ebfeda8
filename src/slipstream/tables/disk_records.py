"""Rows as records: how a disk table numbers its rows, and how weights and state become bytes.

Touch this when the record format or the numbering changes; both decide what files mean.
"""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from slipstream.tables.embedding_table import Rows, row_state
from slipstream.tables.row_optimizers import RowOptimizer
from slipstream.tables.slices import SLICES, Placement, SliceLayout, slice_of

_FILE_BYTES = 256 << 20  # about the size of a file
_MOST_FILES = 128  # each of them stays open
_NUMBERED_PER_FILE = 1 << 20
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Field:
    """One entry of a row inside its record; the name of the weights is empty."""

    name: str
    offset: int
    bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class RecordFormat:
    """A record: the weights, then each entry of state, each padded to a multiple of 8 bytes."""

    def __init__(self, optimizer: RowOptimizer, dim: int, dtype: torch.dtype) -> None:
        entries = {"": torch.zeros(1, dim, dtype=dtype), **row_state(optimizer, dim, dtype)}
        self.fields, self.bytes = [], 0
        for name, one in entries.items():
            size = one.numel() * one.element_size()
            self.fields.append(Field(name, self.bytes, size, tuple(one.shape[1:]), one.dtype))
            self.bytes += -(-size // 8) * 8

    def pack(self, rows: Rows) -> torch.Tensor:
        """Return the rows as records, uint8 [U, bytes]."""
        count = len(rows.weights_UD)
        records = torch.zeros(count, self.bytes, dtype=torch.uint8)
        for field in self.fields:
            value = rows.weights_UD if field.name == "" else rows.state[field.name]
            flat = value.contiguous().view(count, field.bytes // field.dtype.itemsize)
            records[:, field.offset : field.offset + field.bytes] = flat.view(torch.uint8)
        return records

    def unpack(self, records: torch.Tensor) -> Rows:
        """Copy the rows out of their records."""
        values = {}
        for field in self.fields:
            part = records[:, field.offset : field.offset + field.bytes].contiguous()
            values[field.name] = part.view(field.dtype).view(len(records), *field.shape)
        return Rows(values.pop(""), values)


class SliceNumbering:
    """Numbers rows 0 … num_rows - 1 (or those a rank owns) by (slice, key), files by slice range.

    It uses four bytes per row held. Ascending numbers are the order in which tables are saved.
    """

    layout = "slices"

    def __init__(self, num_rows: int, record_bytes: int, placement: Placement, rank: int) -> None:
        self.low, self.high = placement.slices(rank)
        self._part = None if placement.world == 1 else SliceLayout(num_rows, self.low, self.high)
        self.count = num_rows if self._part is None else self._part.count
        files = min(
            max(1, self.count * record_bytes // _FILE_BYTES), _MOST_FILES, self.high - self.low
        )
        bounds = [self.low + (self.high - self.low) * file // files for file in range(files + 1)]
        slices_N = np.empty(self.count, dtype=np.uint16)
        keys_N = None if self._part is None else self._part.keys()
        for start in range(0, self.count, _CHUNK):
            end = min(start + _CHUNK, self.count)
            slices_N[start:end] = slice_of(
                torch.arange(start, end) if keys_N is None else keys_N[start:end]
            ).numpy()
        self._numbers_N = np.empty(self.count, dtype=np.uint32)
        self._numbers_N[np.argsort(slices_N, kind="stable")] = np.arange(
            self.count, dtype=np.uint32
        )
        before_S = np.concatenate([[0], np.bincount(slices_N, minlength=SLICES).cumsum()])
        self.first_of_file = [int(before_S[bound]) for bound in bounds[:-1]]
        self.names = [f"slices-{a:05d}-{b - 1:05d}.rows" for a, b in pairwise(bounds)]

    def numbers_of(self, keys_U: torch.Tensor) -> np.ndarray:
        """Return the number of each key."""
        held_U = keys_U if self._part is None else self._part.locate(keys_U)
        numbers_U: np.ndarray = self._numbers_N[held_U.numpy()]
        return numbers_U.astype(np.int64)

    def keys_of(self, begin: int, end: int) -> torch.Tensor:
        """Return the keys numbered begin … end - 1."""
        found = np.flatnonzero((self._numbers_N >= begin) & (self._numbers_N < end))
        held = torch.from_numpy(found[np.argsort(self._numbers_N[found])])
        return held if self._part is None else self._part.keys()[held]


class PlainNumbering:
    """Takes keys as numbers: a hashed table chooses them, and their count may grow."""

    layout = "numbered"
    low, high = 0, SLICES

    def __init__(self, count: int) -> None:
        self.count = count
        self.first_of_file = [number * _NUMBERED_PER_FILE for number in range(1 << 12)]
        self.names = [f"numbered-{number:05d}.rows" for number in range(1 << 12)]

    def numbers_of(self, keys_U: torch.Tensor) -> np.ndarray:
        return keys_U.numpy()

    def keys_of(self, begin: int, end: int) -> torch.Tensor:
        return torch.arange(begin, end)


Numbering = SliceNumbering | PlainNumbering


def ranges(count: int, shortest: int = 1 << 20, most: int = 32) -> list[tuple[int, int]]:
    """Split 0 … count - 1 into equal ranges (begin, end) but for the last, at most `most`."""
    length = max(shortest, -(-count // most))
    return [(begin, min(begin + length, count)) for begin in range(0, count, length)]


def directory_of(directory: str | Path, name: str, placement: Placement, rank: int) -> Path:
    """Return the directory of one rank's part of a table."""
    part = Path(directory) / name
    return part if placement.world == 1 else part / f"rank-{rank:05d}-of-{placement.world:05d}"
