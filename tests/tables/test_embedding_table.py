"""Every tier is the same table: equal rows and state after 50 optimiser steps, with the same words
where a recipe is wrong.
"""

from itertools import pairwise

import pytest
import torch

from slipstream.errors import SlipstreamError
from slipstream.tables.collection import TableCollection
from slipstream.tables.disk_table import DiskTable
from slipstream.tables.factory import make_table
from slipstream.tables.hashed_table import HashedTable
from slipstream.tables.memory_table import MemoryTable
from slipstream.tables.row_optimizers import RowwiseAdagrad, RowwiseAdam
from slipstream.tables.slices import Placement

ROWS, DIM, STEPS = 4000, 10, 50


def tiers(directory, optimizer, dtype, **options):
    common = {"seed": 8, "dtype": dtype, **options}
    small = {"cache_bytes": 100_000}  # a few hundred rows: most steps write some back
    return {
        "memory": make_table("memory", "item", ROWS, DIM, optimizer, **common),
        "disk": make_table(
            "disk", "item", ROWS, DIM, optimizer, directory=directory / "disk", **small, **common
        ),
        "hashed": make_table("hashed", "item", ROWS, DIM, optimizer, **common),
        "hashed on disk": make_table(
            "hashed",
            "item",
            ROWS,
            DIM,
            optimizer,
            directory=directory / "hashed",
            **small,
            **common,
        ),
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "optimizer", [RowwiseAdagrad(), RowwiseAdam()], ids=lambda optimizer: optimizer.name
)
def test_tiers_are_equal_bit_for_bit_after_50_steps(tmp_path, optimizer, dtype):
    tables = tiers(tmp_path, optimizer, dtype)
    target = torch.randn(DIM, dtype=dtype, generator=torch.Generator().manual_seed(0))
    for name, table in tables.items():
        collection = TableCollection([table])
        generator = torch.Generator().manual_seed(1)
        for step in range(STEPS):
            keys = [
                (torch.rand(shape, generator=generator) ** 3 * ROWS).long()
                for shape in ((150,), (40, 3))
            ]
            lookup = collection.lookup({"item": keys})
            loss = (lookup["item"].rows(0) @ target).exp().sum()
            (
                loss + (lookup["item"].rows_UD[lookup["item"].inverses[1]] - target).square().sum()
            ).backward()
            collection.apply(lookup, 0.05)
            if step == 20 and name == "disk":
                table.flush()
    everything = torch.arange(ROWS)
    expected = tables["memory"].read(everything)
    moved = expected.state["sum" if optimizer.name == "rowwise_adagrad" else "steps"] > 0
    assert 500 < int(moved.sum()) < ROWS
    for name, table in tables.items():
        got = table.read(everything)
        assert torch.equal(got.weights_UD, expected.weights_UD), name
        assert all(
            torch.equal(got.state[entry], expected.state[entry]) for entry in expected.state
        ), name
        kept = torch.cat([keys for keys, _ in table.touched()])
        assert set(moved.nonzero().squeeze(1).tolist()) <= set(kept.tolist())
        table.close()


def test_rows_move_between_tiers_with_their_state(tmp_path):
    tables = tiers(tmp_path, RowwiseAdam(), torch.float32)
    keys = torch.arange(0, ROWS, 3)
    tables["memory"].apply(keys, torch.randn(len(keys), DIM), 0.1)
    chain = list(tables.values())
    for source, target in pairwise(chain):
        for part, rows in source.touched(chunk=100):
            target.write(part, rows)
    everything = torch.arange(ROWS)
    first, last = tables["memory"].read(everything), tables["hashed on disk"].read(everything)
    assert torch.equal(first.weights_UD, last.weights_UD) and torch.equal(
        first.state["m"], last.state["m"]
    )
    for table in chain:
        table.close()


def test_a_cleared_table_is_new_but_its_last_flush_stays(tmp_path):
    keys, births = (
        torch.arange(0, ROWS, 3),
        make_table("memory", "item", ROWS, DIM, RowwiseAdam(), seed=8).read(torch.arange(ROWS)),
    )
    tables = tiers(tmp_path, RowwiseAdam(), torch.float32)
    for table in tables.values():
        table.apply(keys, torch.ones(len(keys), DIM), 0.1)
        trained = table.gather(keys)
        table.flush()
        table.clear()
        assert list(table.touched()) == []
        got = table.read(torch.arange(ROWS))
        assert (
            torch.equal(got.weights_UD, births.weights_UD)
            and not got.state["m"].any()
            and not got.state["steps"].any()
        )
        table.apply(keys[:5], torch.ones(5, DIM), 0.1)
        table.close()
    for name in ("disk", "hashed on disk"):
        reopened = tiers(tmp_path, RowwiseAdam(), torch.float32)
        again = reopened[name]
        assert torch.equal(again.gather(keys), trained)
        for table in reopened.values():
            table.close()


def test_every_rank_has_its_own_directory(tmp_path):
    parts = [
        make_table(
            "disk",
            "item",
            ROWS,
            DIM,
            RowwiseAdam(),
            directory=tmp_path,
            cache_bytes=1 << 20,
            placement=Placement(2),
            rank=rank,
        )
        for rank in range(2)
    ]
    owners = Placement(2).owner_of(torch.arange(ROWS))
    whole = MemoryTable("item", ROWS, DIM, RowwiseAdam())
    for rank, part in enumerate(parts):
        own = (owners == rank).nonzero().squeeze(1)
        assert torch.equal(part.gather(own), whole.gather(own))
        part.flush()
        part.close()
    assert sorted(path.name for path in (tmp_path / "item").iterdir()) == [
        "rank-00000-of-00002",
        "rank-00001-of-00002",
    ]


def test_the_recipe_names_the_tier(tmp_path):
    made = tiers(tmp_path, RowwiseAdam(), torch.float32)
    assert [type(table) for table in made.values()] == [
        MemoryTable,
        DiskTable,
        HashedTable,
        HashedTable,
    ]
    assert isinstance(made["hashed"].storage, MemoryTable) and isinstance(
        made["hashed on disk"].storage, DiskTable
    )
    for table in made.values():
        table.close()
    with pytest.raises(SlipstreamError, match="unknown table tier 'dist'; did you mean 'disk'"):
        make_table("dist", "item", 5, 2, RowwiseAdam())
    with pytest.raises(SlipstreamError, match="name it in tables.directory"):
        make_table("disk", "item", 5, 2, RowwiseAdam())
    with pytest.raises(ValueError, match="needs num_rows"):
        make_table("memory", "item", None, 2, RowwiseAdam())
