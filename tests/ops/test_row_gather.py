"""Rows are copied byte for byte, and rows that are not present are noticed."""

import pytest
import torch

from slipstream.ops.row_gather import gather_present, gather_rows
from slipstream.tables.memory_marks import RowMarks


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
