"""Tables: rows are born by name, move by their optimizer, and travel with their state."""

import pytest
import torch

from slipstream.errors import SlipstreamError
from slipstream.tables.collection import TableCollection
from slipstream.tables.memory_table import MemoryTable, first_rows
from slipstream.tables.row_optimizers import (
    DenseAdamW,
    RowwiseAdagrad,
    RowwiseAdam,
    make_row_optimizer,
)

OPTIMIZERS = [RowwiseAdagrad(), RowwiseAdam(), DenseAdamW(weight_decay=0.1)]


def table(optimizer, name="item", rows=7, dim=3, dtype=torch.float64):
    return MemoryTable(name, rows, dim, optimizer, seed=5, init_scale=0.1, dtype=dtype)


def test_a_row_is_born_from_its_name_alone():
    big = table(RowwiseAdagrad(), rows=70_000, dim=2, dtype=torch.float32)
    keys = torch.tensor([69_999, 3, 65_536])
    assert torch.equal(big.gather(keys), first_rows(5, "item", keys, 2, 0.1, torch.float32))
    assert not torch.equal(first_rows(5, "other", keys, 2, 0.1, torch.float32), big.gather(keys))
    assert not torch.equal(first_rows(6, "item", keys, 2, 0.1, torch.float32), big.gather(keys))
    assert big.weights_ND.abs().max() <= 0.1 and abs(float(big.weights_ND.mean())) < 1e-3


def test_gather_is_a_copy():
    one = table(RowwiseAdagrad())
    one.gather(torch.tensor([1])).zero_()
    assert one.weights_ND[1].abs().sum() > 0


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.name)
def test_untouched_rows_move_only_where_the_rule_says_so(optimizer):
    one = table(optimizer)
    keys, grads = torch.tensor([1, 4]), torch.randn(2, 3, dtype=torch.float64)
    one.apply(torch.tensor([2]), torch.ones(1, 3, dtype=torch.float64), 0.1)
    before = one.weights_ND.clone()
    one.apply(keys, grads, 0.1)
    moved = (one.weights_ND != before).any(1)
    assert moved[keys].all()
    assert bool(moved[2]) == optimizer.updates_untouched_rows


def test_dense_adamw_is_torchs():
    one = table(DenseAdamW(betas=(0.9, 0.98), weight_decay=0.1))
    embedding = torch.nn.Embedding.from_pretrained(one.weights_ND.clone(), freeze=False)
    optimizer = torch.optim.AdamW(
        embedding.parameters(), lr=0.01, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.1
    )
    for step in range(4):
        keys = torch.tensor([[0, 2, 3], [1, 2, 5], [0, 1, 6], [4, 5, 6]][step])
        weights = torch.randn(
            3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(step)
        )
        optimizer.zero_grad()
        (embedding(keys) * weights).sum().backward()
        optimizer.step()
        one.apply(keys, weights, 0.01)
    assert torch.allclose(one.weights_ND, embedding.weight, rtol=1e-12, atol=1e-14)


def test_rowwise_rules_written_out():
    adagrad, adam = table(RowwiseAdagrad(eps=1e-6)), table(RowwiseAdam(betas=(0.8, 0.9), eps=1e-6))
    start = adagrad.weights_ND[2].clone()
    g1, g2 = (
        torch.tensor([[1.0, 2, 3]], dtype=torch.float64),
        torch.tensor([[-1.0, 0, 2]], dtype=torch.float64),
    )
    for grads in (g1, g2):
        adagrad.apply(torch.tensor([2]), grads, 0.1)
        adam.apply(torch.tensor([2]), grads, 0.1)
    sum1, sum2 = 14 / 3, 14 / 3 + 5 / 3
    expected = start - 0.1 * g1[0] / (sum1**0.5 + 1e-6) - 0.1 * g2[0] / (sum2**0.5 + 1e-6)
    assert torch.allclose(adagrad.weights_ND[2], expected, rtol=1e-12)
    m1, v1 = 0.2 * g1[0], 0.1 * 14 / 3
    m2, v2 = 0.8 * m1 + 0.2 * g2[0], 0.9 * v1 + 0.1 * 5 / 3
    expected = start - 0.1 * (m1 / 0.2) / ((v1 / 0.1) ** 0.5 + 1e-6)
    expected = expected - 0.1 * (m2 / (1 - 0.64)) / ((v2 / (1 - 0.81)) ** 0.5 + 1e-6)
    assert torch.allclose(adam.weights_ND[2], expected, rtol=1e-10)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.name)
def test_a_row_travels_with_its_state(optimizer):
    here, there = table(optimizer), table(optimizer)
    keys, grads = torch.tensor([0, 3]), torch.randn(2, 3, dtype=torch.float64)
    here.apply(keys, grads, 0.1)
    there.write(keys, here.read(keys))
    if not optimizer.updates_untouched_rows:
        here.apply(keys, grads, 0.1)
        there.apply(keys, grads, 0.1)
    assert torch.equal(here.weights_ND[keys], there.weights_ND[keys])


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.name)
def test_saved_state_restores_exactly_and_refuses_another_table(optimizer):
    one, two = table(optimizer), table(optimizer)
    one.apply(torch.tensor([0, 3]), torch.randn(2, 3, dtype=torch.float64), 0.1)
    two.load_state_dict({name: value.clone() for name, value in one.state_dict().items()})
    for name, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[name])
    with pytest.raises(SlipstreamError, match="do not fit"):
        table(optimizer, rows=8).load_state_dict(one.state_dict())


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.name)
@pytest.mark.parametrize("rows", [7, 1000])
def test_lookup_lends_unique_rows_and_collects_all_gradients(optimizer, rows):
    tables = TableCollection([table(optimizer, rows=rows), table(optimizer, name="genre", rows=2)])
    history, negatives = torch.tensor([5, 1, 5]), torch.tensor([[1, 6], [0, 5]])
    lookups = tables.lookup({"item": [history, negatives], "genre": [torch.tensor([1, 1])]})
    item = lookups["item"]
    assert torch.equal(item.rows(0), tables["item"].weights_ND[history])
    assert torch.equal(item.unique_U[item.inverses[1]], negatives)
    (item.rows(0).sum() + 2 * item.rows_UD[item.inverses[1]].sum()).backward()
    unique, grads = tables.exchange.collect(lookups.route, lookups)["item"]
    dense = torch.zeros(rows, 3, dtype=torch.float64).index_copy_(0, unique, grads)
    assert dense[:7, 0].tolist() == [2, 3, 0, 0, 0, 4, 2]
    if not optimizer.updates_untouched_rows:
        assert unique.tolist() == [0, 1, 5, 6]
    before = tables["item"].weights_ND.clone()
    tables.apply(lookups, 0.1)
    assert (tables["item"].weights_ND != before).any(1)[[0, 1, 5, 6]].all()


def test_micro_batches_count_as_one_step():
    whole, parts = (TableCollection([table(RowwiseAdam())]) for _ in range(2))
    keys = [torch.tensor([0, 1, 2]), torch.tensor([2, 3, 2])]
    lookup = whole.lookup({"item": [torch.cat(keys)]})
    (lookup["item"].rows(0) ** 2).sum().backward()
    whole.apply(lookup, 0.1)
    lookups = [parts.lookup({"item": [part]}) for part in keys]
    for each in lookups:
        (each["item"].rows(0) ** 2).sum().backward()
    parts.apply(lookups, 0.1)
    assert torch.allclose(whole["item"].weights_ND, parts["item"].weights_ND, rtol=1e-14)
    assert torch.equal(whole["item"].state["steps"], parts["item"].state["steps"])


def test_keys_outside_the_table_are_refused():
    tables = TableCollection([table(RowwiseAdagrad())])
    for key in (-1, 7, 2**62):
        with pytest.raises(IndexError, match=f"a key is {key}"):
            tables.lookup({"item": [torch.tensor([0, key])]})
    with pytest.raises(TypeError, match="int64"):
        tables.lookup({"item": [torch.tensor([0.0])]})
    with pytest.raises(SlipstreamError, match="did you mean 'rowwise_adam'"):
        make_row_optimizer("rowwise_adan", betas=(0.9, 0.98), eps=1e-8)
    assert (
        tables.lookup({"item": [torch.tensor([], dtype=torch.int64)]})["item"].unique_U.numel() == 0
    )
