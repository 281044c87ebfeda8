"""The memory tier: rows appear on first touch, a part of a table is stored alone, bytes are copied
right.
"""

import pytest
import torch

from slipstream.errors import SlipstreamError
from slipstream.ops.row_gather import gather_present, gather_rows
from slipstream.tables.embedding_table import Rows, first_rows
from slipstream.tables.memory_marks import RowMarks
from slipstream.tables.memory_pages import lazy_zeros
from slipstream.tables.memory_table import MemoryTable
from slipstream.tables.row_optimizers import DenseAdamW, RowwiseAdagrad, RowwiseAdam
from slipstream.tables.slices import Placement, slice_of


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_creating_a_table_costs_nothing():
    before = resident()
    table = MemoryTable("big", 50_000_000, 64, RowwiseAdam())
    assert resident() - before < 50 << 20  # the table is 25 GB
    keys = torch.tensor([0, 49_999_999, 7])
    assert torch.equal(table.gather(keys), first_rows(0, "big", keys, 64, 0.035, torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_first_rows_do_not_depend_on_who_computes_them(dtype, monkeypatch):
    keys = torch.tensor([0, 5, 2**63 - 1, 2**62])
    mine = first_rows(3, "item", keys, 7, 0.1, dtype)
    monkeypatch.setattr("slipstream.tables.embedding_table.native.available", lambda: False)
    assert torch.equal(mine, first_rows(3, "item", keys, 7, 0.1, dtype))
    assert torch.allclose(
        mine.double(), first_rows(3, "item", keys, 7, 0.1, torch.float64), atol=1e-8
    )


def test_rows_are_born_once_and_keep_what_was_written():
    table = MemoryTable("item", 100, 4, RowwiseAdagrad(), dtype=torch.float64)
    table.write(
        torch.tensor([3]),
        Rows(
            torch.full((1, 4), 9.0, dtype=torch.float64),
            {"sum": torch.ones(1, dtype=torch.float64)},
        ),
    )
    assert [keys.tolist() for keys, _ in table.touched()] == [[3]]
    got = table.gather(torch.tensor([2, 3, 2]))
    assert (got[1] == 9).all() and torch.equal(got[0], got[2])
    assert (table.weights_ND[3] == 9).all()
    assert torch.equal(
        table.weights_ND[[2, 99]],
        first_rows(0, "item", torch.tensor([2, 99]), 4, 0.035, torch.float64),
    )


@pytest.mark.parametrize(
    "optimizer",
    [RowwiseAdagrad(), RowwiseAdam(), DenseAdamW(weight_decay=0.1)],
    ids=lambda optimizer: optimizer.name,
)
def test_parts_of_a_table_together_are_the_table(optimizer):
    whole = MemoryTable("item", 500, 6, optimizer, seed=4, dtype=torch.float64)
    placement = Placement(3)
    parts = [
        MemoryTable(
            "item", 500, 6, optimizer, seed=4, dtype=torch.float64, placement=placement, rank=rank
        )
        for rank in range(3)
    ]
    assert sum(part._held for part in parts) == 500
    for step in range(4):
        keys = torch.arange(step, 500, 7)
        grads = torch.randn(
            len(keys), 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step)
        )
        whole.apply(keys, grads, 0.1)
        for rank, part in enumerate(parts):
            mine = placement.owner_of(keys) == rank
            part.apply(keys[mine], grads[mine], 0.1)
    for rank, part in enumerate(parts):
        mine = (placement.owner_of(torch.arange(500)) == rank).nonzero().squeeze(1)
        assert torch.equal(part.gather(mine), whole.gather(mine))
        for name, value in part.read(mine).state.items():
            assert torch.equal(value, whole.read(mine).state[name])
        copy = MemoryTable(
            "item", 500, 6, optimizer, seed=4, dtype=torch.float64, placement=placement, rank=rank
        )
        copy.load_state_dict(part.state_dict())
        assert torch.equal(copy.gather(mine), part.gather(mine))
        with pytest.raises(ValueError, match="ask all ranks"):
            part.all_rows()
    with pytest.raises(SlipstreamError, match="do not fit"):
        parts[0].load_state_dict({"weights": torch.zeros(1, 6)})


def test_touched_gives_every_born_row_in_slice_order_and_rebuilds_the_table():
    table = MemoryTable("item", 3000, 4, RowwiseAdam())
    table.apply(torch.arange(0, 3000, 3), torch.randn(1000, 4), 0.1)
    chunks = list(table.touched(chunk=64))
    keys = torch.cat([keys for keys, _ in chunks])
    pairs = list(zip(slice_of(keys).tolist(), keys.tolist(), strict=True))
    assert (
        len(pairs) == 1000 and pairs == sorted(pairs) and max(len(part) for part, _ in chunks) == 64
    )
    twin = MemoryTable("item", 3000, 4, RowwiseAdam())
    for part, rows in chunks:
        twin.write(part, rows)
    for name, value in table.state_dict().items():
        assert torch.equal(value, twin.state_dict()[name])
    assert list(MemoryTable("item", 5, 4, RowwiseAdam()).touched()) == []


def test_a_table_grows_and_keeps_its_rows():
    table = MemoryTable("item", 10, 4, RowwiseAdam(), seed=2)
    table.apply(torch.tensor([1, 9]), torch.ones(2, 4), 0.1)
    before = table.read(torch.arange(10))
    table.grow(1000)
    after = table.read(torch.arange(10))
    assert torch.equal(before.weights_UD, after.weights_UD)
    assert all(torch.equal(before.state[name], after.state[name]) for name in before.state)
    assert torch.equal(
        table.gather(torch.tensor([999])),
        first_rows(2, "item", torch.tensor([999]), 4, 0.035, torch.float32),
    )
    with pytest.raises(ValueError, match="only grow"):
        table.grow(5)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.int64, torch.bool]
)
@pytest.mark.parametrize("shape", [(50, 7), (50, 64), (50,)])
def test_gather_copies_any_bytes(dtype, shape):
    table = (torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 100).to(dtype)
    for count in (0, 1, 9, 5000):
        rows = torch.randint(50, (count,), generator=torch.Generator().manual_seed(count))
        assert torch.equal(gather_rows(table, rows), table.index_select(0, rows))
        assert torch.equal(
            gather_rows(table, rows, backend="reference"), table.index_select(0, rows)
        )
    assert torch.equal(
        gather_rows(table.t(), torch.tensor([0])), table.t().index_select(0, torch.tensor([0]))
    )
    for bad in (-1, 50):
        with pytest.raises(IndexError, match="between 0 and 49"):
            gather_rows(table, torch.tensor([bad]))


@pytest.mark.parametrize("count", [3, 5000])
@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_rows_that_are_not_present_are_noticed(count, kernels, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_BACKEND", kernels)
    table, marks, rows = torch.randn(5000, 8), RowMarks(5000), torch.arange(count).flip(0)
    marks.mark(torch.tensor([n for n in range(5000) if n != 2]))
    assert gather_present(table, rows, marks.bits) is None
    marks.mark(torch.tensor([2, 2]))
    for bits in (marks.bits, None):
        assert torch.equal(gather_present(table, rows, bits), table[rows])
    with pytest.raises(IndexError, match="got 5000"):
        gather_present(table, torch.tensor([0, 5000]), marks.bits)


def test_marks_are_a_set_of_rows():
    marks, rows = RowMarks(1001), torch.tensor([1000, 0, 7, 8, 500, 8])
    marks.mark(rows)
    assert marks.marked().tolist() == [0, 7, 8, 500, 1000]
    assert marks.unmarked(torch.tensor([7, 9, 1000])).tolist() == [False, True, False]
    larger = marks.extended(5000)
    assert larger.marked().tolist() == [0, 7, 8, 500, 1000] and len(larger.bits) == 625
    marks.mark_all()
    assert marks.marked().tolist() == list(range(1001))


def test_lazy_zeros_are_zeros():
    for shape in ((3, 4), (1 << 15, 64)):
        zeros = lazy_zeros(*shape, dtype=torch.float32)
        assert zeros.shape == shape and zeros.is_contiguous() and not zeros.any()
        zeros[-1, -1] = 1
        assert zeros.sum() == 1


def test_keys_outside_are_refused_by_every_verb():
    table = MemoryTable("item", 7, 2, RowwiseAdagrad())
    rows = table.read(torch.tensor([1]))
    for key in (-1, 7, 2**62):
        keys = torch.tensor([key])
        for call in (
            lambda k=keys: table.gather(k),
            lambda k=keys: table.apply(k, torch.ones(1, 2), 0.1),
            lambda k=keys: table.read(k),
            lambda k=keys: table.write(k, rows),
        ):
            with pytest.raises(IndexError, match=f"a key is {key}"):
                call()
