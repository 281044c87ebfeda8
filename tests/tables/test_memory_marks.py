"""Marks are a set of rows, and the native gather reads their bits."""

import pytest
import torch

from slipstream.ops.row_gather import gather_present
from slipstream.tables.memory_marks import RowMarks


def test_marks_are_a_set_of_rows():
    marks, rows = RowMarks(1001), torch.tensor([1000, 0, 7, 8, 500, 8])
    marks.mark(rows)
    assert marks.marked().tolist() == [0, 7, 8, 500, 1000]
    assert marks.unmarked(torch.tensor([7, 9, 1000])).tolist() == [False, True, False]
    larger = marks.extended(5000)
    assert larger.marked().tolist() == [0, 7, 8, 500, 1000] and len(larger.bits) == 625
    marks.mark_all()
    assert marks.marked().tolist() == list(range(1001))


@pytest.mark.parametrize("count", [3, 5000])
@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_a_gather_notices_rows_without_a_mark(count, kernels, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_BACKEND", kernels)
    table, marks, rows = torch.randn(5000, 8), RowMarks(5000), torch.arange(count).flip(0)
    marks.mark(torch.tensor([n for n in range(5000) if n != 2]))
    assert gather_present(table, rows, marks.bits) is None
    marks.mark(torch.tensor([2, 2]))
    for bits in (marks.bits, None):
        assert torch.equal(gather_present(table, rows, bits), table[rows])
    with pytest.raises(IndexError, match="got 5000"):
        gather_present(table, torch.tensor([0, 5000]), marks.bits)
