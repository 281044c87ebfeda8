"""A recipe names the kind of table, and every rank has its own directory."""

import pytest
import torch

from slipstream.errors import SlipstreamError
from slipstream.tables.disk_table import DiskTable
from slipstream.tables.factory import make_table
from slipstream.tables.hashed_table import HashedTable
from slipstream.tables.memory_table import MemoryTable
from slipstream.tables.row_optimizers import RowwiseAdam
from slipstream.tables.slices import Placement
from tests.support.table_samples import DIM, ROWS, every_kind


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


def test_the_recipe_names_the_kind_of_table(tmp_path):
    made = every_kind(tmp_path, RowwiseAdam())
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
    with pytest.raises(SlipstreamError, match=r"name it in tables\.directory"):
        make_table("disk", "item", 5, 2, RowwiseAdam())
    with pytest.raises(ValueError, match="needs num_rows"):
        make_table("memory", "item", None, 2, RowwiseAdam())
