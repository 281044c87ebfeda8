"""Rows copied by number: any dtype, any order, with a mark for rows that are not there."""

import pytest
import torch

from slipstream.ops.row_gather import gather_present, gather_rows

BACKENDS = ["native", "reference"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.int64])
def test_rows_are_copied_in_any_order_with_repeats(dtype, backend):
    table_ND = torch.arange(60).reshape(20, 3).to(dtype)
    rows_U = torch.tensor([19, 0, 7, 7, 3])
    found_UD = gather_rows(table_ND, rows_U, backend=backend)
    assert torch.equal(found_UD, table_ND[rows_U])
    found_UD.zero_()
    assert table_ND.count_nonzero() == 59


def test_a_table_with_gaps_and_no_rows_at_all():
    table_ND = torch.arange(60.0).reshape(20, 3)
    assert torch.equal(gather_rows(table_ND[:, :2], torch.tensor([4])), table_ND[4:5, :2])
    assert gather_rows(table_ND, torch.tensor([], dtype=torch.int64)).shape == (0, 3)


def test_one_absent_row_means_nothing_is_returned():
    table_ND = torch.arange(60.0).reshape(20, 3)
    present = torch.tensor([0b10000001, 0b00000010, 0], dtype=torch.uint8)  # rows 0, 7 and 9
    for table in (table_ND, table_ND[:, :2]):
        there = gather_present(table, torch.tensor([9, 0, 7]), present)
        assert torch.equal(there, table[[9, 0, 7]])
        assert gather_present(table, torch.tensor([9, 8]), present) is None
        assert gather_present(table, torch.tensor([8]), None) is not None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("row", [20, -1, 2**62])
def test_a_row_outside_the_table_is_refused(row, backend):
    with pytest.raises(IndexError, match="between 0 and 19"):
        gather_rows(torch.ones(20, 3), torch.tensor([1, row]), backend=backend)
