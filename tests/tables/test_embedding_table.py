"""All kinds of tables are equal: rows and state after 50 steps, and what is saved of them."""

from itertools import pairwise

import pytest
import torch

from slipstream.errors import SlipstreamError
from slipstream.tables.collection import TableCollection
from slipstream.tables.embedding_table import check_keys, first_rows, save_touched, write_saved
from slipstream.tables.factory import make_table
from slipstream.tables.row_optimizers import RowwiseAdagrad, RowwiseAdam
from tests.support.table_samples import DIM, ROWS, every_kind


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "optimizer", [RowwiseAdagrad(), RowwiseAdam()], ids=lambda optimizer: optimizer.name
)
def test_all_kinds_of_tables_are_equal_bit_for_bit_after_50_steps(tmp_path, optimizer, dtype):
    tables = every_kind(tmp_path, optimizer, dtype)
    target = torch.randn(DIM, dtype=dtype, generator=torch.Generator().manual_seed(0))
    for name, table in tables.items():
        collection = TableCollection([table])
        generator = torch.Generator().manual_seed(1)
        for step in range(50):
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
    updated = expected.state["sum" if optimizer.name == "rowwise_adagrad" else "steps"] > 0
    assert 500 < int(updated.sum()) < ROWS
    for name, table in tables.items():
        got = table.read(everything)
        assert torch.equal(got.weights_UD, expected.weights_UD), name
        assert all(
            torch.equal(got.state[entry], expected.state[entry]) for entry in expected.state
        ), name
        kept = torch.cat([keys for keys, _ in table.touched()])
        assert set(updated.nonzero().squeeze(1).tolist()) <= set(kept.tolist())
        table.close()


def test_rows_go_from_one_kind_of_table_to_another_with_their_state(tmp_path):
    tables = every_kind(tmp_path, RowwiseAdam())
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
    tables = every_kind(tmp_path, RowwiseAdam())
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
        reopened = every_kind(tmp_path, RowwiseAdam())
        again = reopened[name]
        assert torch.equal(again.gather(keys), trained)
        for table in reopened.values():
            table.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_first_rows_do_not_depend_on_who_computes_them(dtype, monkeypatch):
    keys = torch.tensor([0, 5, 2**63 - 1, 2**62])
    mine = first_rows(3, "item", keys, 7, 0.1, dtype)
    monkeypatch.setattr("slipstream.tables.embedding_table.native.available", lambda: False)
    assert torch.equal(mine, first_rows(3, "item", keys, 7, 0.1, dtype))
    assert torch.allclose(
        mine.double(), first_rows(3, "item", keys, 7, 0.1, torch.float64), atol=1e-8
    )


def test_keys_must_be_int64_rows_of_the_table():
    check_keys("item", None, torch.tensor([0, 2**63 - 1]))
    check_keys("item", 5, torch.tensor([], dtype=torch.int64))
    with pytest.raises(TypeError, match="keys of table 'item' must be int64"):
        check_keys("item", 5, torch.tensor([1], dtype=torch.int32))
    for num_rows, key, rows in ((5, 5, "0 … 4"), (5, -1, "0 … 4"), (None, -7, "0 … 2\\^63 - 1")):
        with pytest.raises(IndexError, match=f"has rows {rows}, but a key is {key}"):
            check_keys("item", num_rows, torch.tensor([key]))


def test_a_table_needs_a_row_and_a_column(tmp_path):
    for rows, dim in ((0, 4), (4, 0)):
        with pytest.raises(ValueError, match=f"got {rows} x {dim}"):
            make_table("memory", "item", rows, dim, RowwiseAdam())
        with pytest.raises(ValueError, match=f"got {rows} x {dim}"):
            make_table("disk", "item", rows, dim, RowwiseAdam(), directory=tmp_path)


def test_saved_rows_of_another_width_or_optimizer_are_refused(tmp_path):
    saved = save_touched(every_kind(tmp_path / "a", RowwiseAdagrad())["disk"])
    assert sorted(saved) == ["keys", "state.sum", "weights"] and len(saved["keys"]) == 0
    other = every_kind(tmp_path / "b", RowwiseAdam())["hashed"]
    with pytest.raises(SlipstreamError, match="do not fit: this table has rows of 6"):
        write_saved(other, saved)
