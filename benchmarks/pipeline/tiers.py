"""Tables of the pipeline benchmark: shipped ones that time their calls; the disk one can be slow.

A tier is slow by rate (so many rows a second, as a disk), or by latency (every call waits once, as
a remote store of any bandwidth does). Waiting uses no processor. Touch this when a tier should be
slow in another way.
"""

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from slipstream.tables.disk_table import DiskTable, ReadThrottle
from slipstream.tables.embedding_table import Rows
from slipstream.tables.memory_table import MemoryTable
from slipstream.tables.row_optimizers import RowOptimizer

T = TypeVar("T")


def cache_bytes_of(rows: int, dim: int, optimizer: RowOptimizer) -> int:
    """Return the `cache_bytes` with which a disk table caches exactly so many rows."""
    budget = 1 << 24
    with tempfile.TemporaryDirectory() as scratch:
        table = DiskTable("size", 1, dim, optimizer, scratch, cache_bytes=budget)
        row_bytes = budget // table.cache_rows
        table.close()
    return rows * row_bytes


class TimedMemoryTable(MemoryTable):
    """A memory table; `seconds` is the time spent in it."""

    seconds = 0.0

    def _timed(self, call: Callable[..., T], *arguments: Any) -> T:
        begin = time.perf_counter()
        result = call(*arguments)
        self.seconds += time.perf_counter() - begin
        return result

    def gather(self, keys_U: torch.Tensor) -> torch.Tensor:
        return self._timed(super().gather, keys_U)

    def read(self, keys_U: torch.Tensor) -> Rows:
        return self._timed(super().read, keys_U)

    def apply(self, keys_U: torch.Tensor, grads_UD: torch.Tensor, lr: float) -> None:
        self._timed(super().apply, keys_U, grads_UD, lr)

    def write(self, keys_U: torch.Tensor, rows: Rows) -> None:
        self._timed(super().write, keys_U, rows)


class SlowDiskTable(DiskTable):
    """A disk table whose reads take the time of a slower tier; `seconds` is the time spent in it.

    `read_rate` is rows a second. `latency` is what a call waits that reads rows from the files,
    once for all of them; calls of several threads wait at the same time.
    """

    def __init__(
        self,
        name: str,
        num_rows: int,
        dim: int,
        optimizer: RowOptimizer,
        directory: Path,
        *,
        read_rate: float | None = None,
        latency: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(name, num_rows, dim, optimizer, directory, **options)
        self._pace, self._latency = None if read_rate is None else ReadThrottle(read_rate), latency
        self._at_full_speed, self.seconds = False, 0.0
        self._of_thread = threading.local()  # `reads`: rows that the thread's call read from files

    @contextmanager
    def at_full_speed(self) -> Iterator[None]:
        """Let nothing wait inside."""
        self._at_full_speed = True
        try:
            yield
        finally:
            self._at_full_speed = False

    def _slowed(self, call: Callable[..., T], *arguments: Any) -> T:
        begin, self._of_thread.reads = time.perf_counter(), 0
        result = call(*arguments)
        reads = self._of_thread.reads
        if reads and not self._at_full_speed:
            time.sleep(self._latency)
            if self._pace is not None:
                self._pace.wait(reads)
        self.seconds += time.perf_counter() - begin
        return result

    def _load(self, keys_U: torch.Tensor, numbers_U: np.ndarray) -> Rows:
        read = int(self._files.written(numbers_U).sum())
        self._of_thread.reads = getattr(self._of_thread, "reads", 0) + read
        return super()._load(keys_U, numbers_U)

    def gather(self, keys_U: torch.Tensor) -> torch.Tensor:
        return self._slowed(super().gather, keys_U)

    def read(self, keys_U: torch.Tensor) -> Rows:
        return self._slowed(super().read, keys_U)

    def apply(self, keys_U: torch.Tensor, grads_UD: torch.Tensor, lr: float) -> None:
        self._slowed(super().apply, keys_U, grads_UD, lr)

    def write(self, keys_U: torch.Tensor, rows: Rows) -> None:
        self._slowed(super().write, keys_U, rows)
