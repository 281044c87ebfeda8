"""Makes the kind of table that a recipe names. Touch this to add a kind of table."""

from pathlib import Path
from typing import Any, Literal

import torch

from slipstream.errors import SlipstreamError, did_you_mean
from slipstream.tables.disk_records import directory_of
from slipstream.tables.disk_table import DiskTable
from slipstream.tables.embedding_table import EmbeddingTable
from slipstream.tables.hashed_table import Evict, GrowableTable, HashedTable
from slipstream.tables.memory_table import MemoryTable
from slipstream.tables.row_optimizers import RowOptimizer
from slipstream.tables.slices import Placement

TIERS = ("memory", "disk", "hashed")
_FIRST_ROWS = 1024  # rows in the storage of a new hashed table; it grows


def make_table(
    tier: str | Literal["memory", "disk", "hashed"],
    name: str,
    num_rows: int | None,
    dim: int,
    optimizer: RowOptimizer,
    *,
    seed: int = 0,
    init_scale: float = 0.035,
    dtype: torch.dtype = torch.float32,
    placement: Placement | None = None,
    rank: int = 0,
    directory: str | Path | None = None,
    cache_bytes: int = 1 << 30,
    read_rate: float | None = None,
    admit_after: int = 1,
    max_rows: int | None = None,
    evict: Evict = "lru",
) -> EmbeddingTable:
    """Make a table of tier `memory`, `disk` or `hashed`: one rank's part of it.

    `disk` needs a `directory`; `hashed` keeps its rows in files if there is one, else in memory.
    The files of table `name` are in `directory/name`, with several ranks in one directory per rank.
    """
    if tier not in TIERS:
        raise SlipstreamError(f"unknown table tier '{tier}'{did_you_mean(tier, TIERS)}")
    placement = placement or Placement(1)
    if tier == "disk" and directory is None:
        raise SlipstreamError(
            "tables.tier=disk keeps its rows in files; name it in tables.directory"
        )
    if tier != "hashed" and num_rows is None:
        raise ValueError(f"table '{name}' of tier {tier} needs num_rows")
    common: dict[str, Any] = {"seed": seed, "init_scale": init_scale, "dtype": dtype}
    place = None if directory is None else directory_of(directory, name, placement, rank)
    files: dict[str, Any] = {"cache_bytes": cache_bytes, "read_rate": read_rate}
    if tier == "hashed":
        storage: GrowableTable = (
            MemoryTable(name, _FIRST_ROWS, dim, optimizer, **common)
            if place is None
            else DiskTable(
                name, _FIRST_ROWS, dim, optimizer, place, numbered=True, **common, **files
            )
        )
        return HashedTable(
            storage, num_rows=num_rows, admit_after=admit_after, max_rows=max_rows, evict=evict
        )
    assert num_rows is not None
    if tier == "memory":
        return MemoryTable(name, num_rows, dim, optimizer, placement=placement, rank=rank, **common)
    assert place is not None
    return DiskTable(
        name, num_rows, dim, optimizer, place, placement=placement, rank=rank, **common, **files
    )
