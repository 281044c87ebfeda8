"""Rows updated since the last save are those that training changed, in every kind of table."""

import pytest
import torch

from slipstream.tables.factory import make_table
from slipstream.tables.row_optimizers import RowwiseAdagrad
from slipstream.tables.updated_rows import UpdatedRows


def test_marks_survive_growing_and_end_when_taken():
    marks = UpdatedRows(8)
    marks.mark(torch.tensor([7, 2, 2]))
    marks.grow(20)
    marks.mark(torch.tensor([15]))
    assert marks.count == 3 and marks.take().nonzero()[0].tolist() == [2, 7, 15]
    marks.mark_first(3)
    assert marks.take().nonzero()[0].tolist() == [0, 1, 2] and marks.count == 0
    assert marks.take(ever=True).nonzero()[0].tolist() == [0, 1, 2, 7, 15]


def changed(table):
    """Take the rows that changed; from then on they count as saved."""
    found = {}
    for keys, rows in table.snapshot(whole=False, most_bytes=1 << 20).pieces(64):
        found |= dict(zip(keys.tolist(), rows.weights_UD.clone(), strict=True))
    return found


@pytest.mark.parametrize("tier", ["memory", "disk", "hashed"])
def test_a_table_tells_which_rows_changed_since_it_was_saved(tmp_path, tier):
    table = make_table(tier, "item", 100, 4, RowwiseAdagrad(), directory=tmp_path)
    table.gather(torch.arange(100))  # reading changes nothing
    assert changed(table) == {}
    for keys in ([3, 7, 50], [7, 99]):
        table.apply(torch.tensor(keys), torch.ones(len(keys), 4), 0.1)
    table.write(torch.tensor([4]), table.read(torch.tensor([4])))
    assert table.num_updated == 5
    rows = changed(table)
    assert sorted(rows) == [3, 4, 7, 50, 99]
    for key, weights in rows.items():
        assert torch.equal(weights, table.gather(torch.tensor([key]))[0])
    assert changed(table) == {}
    table.apply(torch.tensor([50]), torch.ones(1, 4), 0.1)
    assert sorted(changed(table)) == [50]
    table.apply(torch.tensor([51]), torch.ones(1, 4), 0.1)
    table.mark_saved()
    assert changed(table) == {} and table.num_updated == 0
    table.apply(torch.tensor([52]), torch.ones(1, 4), 0.1)
    table.clear()
    assert changed(table) == {}
    table.close()


def test_a_hashed_table_tells_which_ids_lost_their_row():
    table = make_table("hashed", "item", None, 4, RowwiseAdagrad(), max_rows=16)
    for first in (0, 10, 20):
        ids = torch.arange(first, first + 10)
        table.apply(ids, torch.ones(10, 4), 0.1)
    present = {key for keys, _ in table.touched() for key in keys.tolist()}
    assert set(table.removed().tolist()) == set(range(30)) - present and len(present) < 30
    table.mark_saved()
    assert table.removed().tolist() == []
