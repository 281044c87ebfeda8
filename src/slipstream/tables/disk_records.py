"""Rows as records: where the numbers of a disk table's rows come from, and how weights and state
become bytes.
"""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from slipstream.tables.embedding_table import Rows, row_state
from slipstream.tables.row_optimizers import RowOptimizer
from slipstream.tables.slices import SLICES, Placement, SliceLayout, slice_of

_FILE_BYTES = 256 << 20  # a file should hold about so much
_MOST_FILES = 128  # each is an open file
_NUMBERED_PER_FILE = 1 << 20
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Field:
    """One entry of a row inside its record."""

    name: str
    at: int
    bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class RecordFormat:
    """A record is the weights, then each entry of state, rounded up to eight bytes."""

    def __init__(self, optimizer: RowOptimizer, dim: int, dtype: torch.dtype) -> None:
        entries = {"": torch.zeros(1, dim, dtype=dtype), **row_state(optimizer, dim, dtype)}
        self.fields, at = [], 0
        for name, one in entries.items():
            self.fields.append(
                Field(name, at, one.numel() * one.element_size(), tuple(one.shape[1:]), one.dtype)
            )
            at += -(-self.fields[-1].bytes // 8) * 8
        self.bytes = at

    def pack(self, rows: Rows) -> torch.Tensor:
        """uint8 [U, bytes]."""
        count = len(rows.weights_UD)
        records = torch.zeros(count, self.bytes, dtype=torch.uint8)
        for field in self.fields:
            value = rows.weights_UD if field.name == "" else rows.state[field.name]
            flat = value.contiguous().view(count, field.bytes // field.dtype.itemsize)
            records[:, field.at : field.at + field.bytes] = flat.view(torch.uint8)
        return records

    def unpack(self, records: torch.Tensor) -> Rows:
        """The rows again, copied."""
        values = {}
        for field in self.fields:
            part = records[:, field.at : field.at + field.bytes].contiguous()
            values[field.name] = part.view(field.dtype).view(len(records), *field.shape)
        return Rows(values.pop(""), values)


class SliceNumbers:
    """Rows 0 … num_rows - 1 (or those a rank owns) numbered by (slice, key), in one file per range
    of slices.

    Costs four bytes per row held; a walk over all numbers gives rows in the order in which tables
    are saved.
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

    def of(self, keys_U: torch.Tensor) -> np.ndarray:
        """The number of each key."""
        held_U = keys_U if self._part is None else self._part.locate(keys_U)
        return self._numbers_N[held_U.numpy()].astype(np.int64)

    def keys_of(self, begin: int, end: int) -> torch.Tensor:
        """The keys numbered begin … end - 1."""
        found = np.flatnonzero((self._numbers_N >= begin) & (self._numbers_N < end))
        held = torch.from_numpy(found[np.argsort(self._numbers_N[found])])
        return held if self._part is None else self._part.keys()[held]


class PlainNumbers:
    """Rows that are their own numbers, as a hashed table hands them out; there may always be more."""

    layout = "numbered"
    low, high = 0, SLICES

    def __init__(self, count: int) -> None:
        self.count = count
        self.first_of_file = [number * _NUMBERED_PER_FILE for number in range(1 << 12)]
        self.names = [f"numbered-{number:05d}.rows" for number in range(1 << 12)]

    def of(self, keys_U: torch.Tensor) -> np.ndarray:
        return keys_U.numpy()

    def keys_of(self, begin: int, end: int) -> torch.Tensor:
        return torch.arange(begin, end)


Numbers = SliceNumbers | PlainNumbers


def runs(count: int, shortest: int = 1 << 20, most: int = 32) -> list[tuple[int, int]]:
    """Numbers 0 … count - 1 as (begin, end), in not more than `most` runs where they are long."""
    length = max(shortest, -(-count // most))
    return [(begin, min(begin + length, count)) for begin in range(0, count, length)]


def directory_of(directory: str | Path, name: str, placement: Placement, rank: int) -> Path:
    """Where one rank's part of a table lies."""
    part = Path(directory) / name
    return part if placement.world == 1 else part / f"rank-{rank:05d}-of-{placement.world:05d}"
