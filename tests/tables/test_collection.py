"""A collection reads unique rows once and collects all gradients of a step."""

import pytest
import torch

from slipstream.tables.collection import TableCollection
from slipstream.tables.row_optimizers import (
    RowwiseAdagrad,
    RowwiseAdam,
)
from tests.support.table_samples import OPTIMIZERS, small_table


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.name)
@pytest.mark.parametrize("rows", [7, 1000])
def test_a_lookup_reads_unique_rows_and_collects_all_gradients(optimizer, rows):
    tables = TableCollection(
        [small_table(optimizer, rows=rows), small_table(optimizer, name="genre", rows=2)]
    )
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
    whole, parts = (TableCollection([small_table(RowwiseAdam())]) for _ in range(2))
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
    tables = TableCollection([small_table(RowwiseAdagrad())])
    for key in (-1, 7, 2**62):
        with pytest.raises(IndexError, match=f"a key is {key}"):
            tables.lookup({"item": [torch.tensor([0, key])]})
    with pytest.raises(TypeError, match="int64"):
        tables.lookup({"item": [torch.tensor([0.0])]})
    assert (
        tables.lookup({"item": [torch.tensor([], dtype=torch.int64)]})["item"].unique_U.numel() == 0
    )


def test_saved_tables_are_flat_by_table_and_load_again(tmp_path):
    one, two = (
        TableCollection([small_table(RowwiseAdam()), small_table(RowwiseAdagrad(), name="genre")])
        for _ in range(2)
    )
    lookups = one.lookup({"item": [torch.tensor([1, 2])], "genre": [torch.tensor([0])]})
    (lookups["item"].rows(0).sum() + lookups["genre"].rows(0).sum()).backward()
    one.apply(lookups, 0.1)
    saved = {name: value.clone() for name, value in one.state_dict().items()}
    assert sorted(saved) == [
        *("genre/state.sum", "genre/weights"),
        *("item/state.m", "item/state.steps", "item/state.v", "item/weights"),
    ]
    two.load_state_dict(saved)
    assert torch.equal(two.all_rows("item"), one.all_rows("item"))
    two.clear()
    assert torch.equal(two.all_rows("item"), small_table(RowwiseAdam()).all_rows())
