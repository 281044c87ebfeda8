"""Small tables for tests: on disk and the same in memory, one of every kind, shared by ranks."""

import torch

from slipstream.tables.disk_table import DiskTable
from slipstream.tables.factory import make_table
from slipstream.tables.memory_table import MemoryTable
from slipstream.tables.row_optimizers import DenseAdamW, RowwiseAdagrad, RowwiseAdam

OPTIMIZERS = [RowwiseAdagrad(), RowwiseAdam(), DenseAdamW(weight_decay=0.1)]
SIZES = {"item": (5000, 8), "genre": (7, 3), "user": (400, 5), "small": (11, 4)}
ROWS, DIM = 3000, 6


def disk(directory, optimizer=None, cache_bytes=60_000, rows=ROWS, dim=DIM, **options):
    return DiskTable(
        "item",
        rows,
        dim,
        optimizer or RowwiseAdam(),
        directory,
        cache_bytes=cache_bytes,
        seed=1,
        **options,
    )


def memory(optimizer=None, **options):
    return MemoryTable("item", ROWS, DIM, optimizer or RowwiseAdam(), seed=1, **options)


def train(*tables, steps=6, seed=0, width=300):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        keys = (torch.rand(width, generator=generator) ** 2 * ROWS).long().unique()
        grads = torch.randn(len(keys), DIM, generator=generator)
        for table in tables:
            table.gather(keys)
            table.apply(keys, grads, 0.1)


def assert_same_rows(one, other, keys=None):
    keys = torch.arange(ROWS) if keys is None else keys
    mine, twins = one.read(keys), other.read(keys)
    assert torch.equal(mine.weights_UD, twins.weights_UD)
    assert mine.state.keys() == twins.state.keys()
    assert all(torch.equal(mine.state[name], twins.state[name]) for name in mine.state)


def small_table(optimizer, name="item", rows=7, dim=3, dtype=torch.float64):
    return MemoryTable(name, rows, dim, optimizer, seed=5, init_scale=0.1, dtype=dtype)


def every_kind(directory, optimizer, dtype=torch.float32):
    """One table of each kind with the same rows; the caches on disk hold a few hundred of them."""
    common = {"seed": 8, "dtype": dtype}
    files = {"cache_bytes": 60_000, **common}

    def made(tier, **options):
        return make_table(tier, "item", ROWS, DIM, optimizer, **options)

    return {
        "memory": made("memory", **common),
        "disk": made("disk", directory=directory / "disk", **files),
        "hashed": made("hashed", **common),
        "hashed on disk": made("hashed", directory=directory / "hashed", **files),
    }


def shared_tables(dtype=torch.float64):
    """Tables that ranks share, one of them kept whole by every rank (`small`)."""
    optimizers = {"genre": RowwiseAdam(), "small": DenseAdamW(weight_decay=0.1)}
    return [
        MemoryTable(n, rows, dim, optimizers.get(n, RowwiseAdagrad()), seed=5, dtype=dtype)
        for n, (rows, dim) in SIZES.items()
    ]


def batch_keys(rank, step):
    """Key lists of another size on each rank; rank 1 never uses `user`, and nothing in step 2."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    size = 0 if (rank, step) == (1, 2) else 40 + 17 * rank
    keys = {
        name: [torch.randint(rows, (size,), generator=draw) for _ in range(2)]
        for name, (rows, _) in SIZES.items()
    }
    keys["item"].append(torch.randint(5000, (size, 3), generator=draw))
    if rank == 1:
        del keys["user"]
    return keys
