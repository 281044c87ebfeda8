"""A memory table sets rows on first use, stores its part alone and keeps rows with their state."""

import pytest
import torch

from slipstream.errors import SlipstreamError
from slipstream.ops.row_gather import gather_rows
from slipstream.tables.embedding_table import Rows, first_rows
from slipstream.tables.memory_table import MemoryTable
from slipstream.tables.row_optimizers import DenseAdamW, RowwiseAdagrad, RowwiseAdam
from slipstream.tables.slices import Placement, slice_of
from tests.support.table_samples import OPTIMIZERS, small_table


def test_only_rows_that_are_used_get_a_value_in_a_table_larger_than_memory():
    table = MemoryTable("big", 50_000_000, 64, RowwiseAdam())  # 25 GB
    keys = torch.tensor([0, 49_999_999, 7])
    assert torch.equal(table.gather(keys), first_rows(0, "big", keys, 64, 0.035, torch.float32))
    assert [part.sort().values.tolist() for part, _ in table.touched()] == [[0, 7, 49_999_999]]


def test_first_values_are_set_once_and_never_over_what_was_written():
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


def test_touched_rows_come_by_slice_and_rebuild_the_table():
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


def test_keys_outside_are_refused_by_every_method():
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


def test_a_first_value_depends_on_seed_table_and_key_alone():
    big = small_table(RowwiseAdagrad(), rows=70_000, dim=2, dtype=torch.float32)
    keys = torch.tensor([69_999, 3, 65_536])
    assert torch.equal(big.gather(keys), first_rows(5, "item", keys, 2, 0.1, torch.float32))
    assert not torch.equal(first_rows(5, "other", keys, 2, 0.1, torch.float32), big.gather(keys))
    assert not torch.equal(first_rows(6, "item", keys, 2, 0.1, torch.float32), big.gather(keys))
    assert big.weights_ND.abs().max() <= 0.1 and abs(float(big.weights_ND.mean())) < 1e-3


def test_gather_is_a_copy():
    one = small_table(RowwiseAdagrad())
    one.gather(torch.tensor([1])).zero_()
    assert one.weights_ND[1].abs().sum() > 0


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.name)
def test_a_row_is_written_with_its_state(optimizer):
    here, there = small_table(optimizer), small_table(optimizer)
    keys, grads = torch.tensor([0, 3]), torch.randn(2, 3, dtype=torch.float64)
    here.apply(keys, grads, 0.1)
    there.write(keys, here.read(keys))
    if not optimizer.updates_untouched_rows:
        here.apply(keys, grads, 0.1)
        there.apply(keys, grads, 0.1)
    assert torch.equal(here.weights_ND[keys], there.weights_ND[keys])


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.name)
def test_saved_state_restores_exactly_and_refuses_another_table(optimizer):
    one, two = small_table(optimizer), small_table(optimizer)
    one.apply(torch.tensor([0, 3]), torch.randn(2, 3, dtype=torch.float64), 0.1)
    two.load_state_dict({name: value.clone() for name, value in one.state_dict().items()})
    for name, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[name])
    with pytest.raises(SlipstreamError, match="do not fit"):
        small_table(optimizer, rows=3).load_state_dict(one.state_dict())


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.name)
def test_a_larger_table_loads_the_first_rows_and_the_others_are_born(optimizer):
    one, fresh = small_table(optimizer), small_table(optimizer, rows=300)
    larger, expected = small_table(optimizer, rows=300), small_table(optimizer, rows=300)
    for table in (one, expected):
        table.apply(torch.tensor([0, 3]), torch.ones(2, 3, dtype=torch.float64), 0.1)
    larger.apply(torch.tensor([200]), torch.ones(1, 3, dtype=torch.float64), 0.1)  # forgotten
    larger.load_state_dict(one.state_dict())
    rows = one.num_rows
    assert torch.equal(larger.weights_ND[:rows], one.weights_ND)
    assert torch.equal(larger.weights_ND[rows:], fresh.weights_ND[rows:])
    if not optimizer.updates_untouched_rows:
        for table in (larger, expected):
            table.apply(torch.tensor([3, 299]), torch.ones(2, 3, dtype=torch.float64), 0.1)
        assert torch.equal(larger.weights_ND, expected.weights_ND)


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
