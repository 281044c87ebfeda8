"""A process that trains a disk table and flushes it until it is killed (test_disk_table_kill)."""

import sys
from pathlib import Path

import torch

from slipstream.tables.disk_table import DiskTable
from slipstream.tables.hashed_table import HashedTable
from slipstream.tables.memory_table import MemoryTable
from slipstream.tables.row_optimizers import RowwiseAdam

ROWS, DIM, FLUSH_EVERY = 2000, 4, 3


def make(kind: str, directory: Path | None):
    """The table under test; without a directory the same table in memory."""
    options = {"seed": 2, "dtype": torch.float32}
    if kind == "disk":
        if directory is None:
            return MemoryTable("item", ROWS, DIM, RowwiseAdam(), **options)
        return DiskTable("item", ROWS, DIM, RowwiseAdam(), directory, cache_bytes=30_000, **options)
    storage = (
        MemoryTable("item", 16, DIM, RowwiseAdam(), **options)
        if directory is None
        else DiskTable(
            "item", 16, DIM, RowwiseAdam(), directory, cache_bytes=30_000, numbered=True, **options
        )
    )
    return HashedTable(storage, admit_after=2, max_rows=900, num_rows=ROWS)


def step(table, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    keys = torch.randint(ROWS, (300,), generator=generator).unique()
    grads = torch.randn(len(keys), DIM, generator=generator)
    table.gather(keys)
    table.apply(keys, grads, 0.1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    table = make(sys.argv[1], Path(sys.argv[2]))
    for number in range(int(sys.argv[3]), 1_000_000):
        step(table, number)
        if (number + 1) % FLUSH_EVERY == 0:
            table.flush()
            print(number + 1, flush=True)
