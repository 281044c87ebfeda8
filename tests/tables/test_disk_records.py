"""Records keep every bit of a row; numbers follow slice and key."""

import numpy as np
import pytest
import torch

from slipstream.tables.disk_records import RecordFormat, SliceNumbering
from slipstream.tables.embedding_table import Rows
from slipstream.tables.row_optimizers import RowwiseAdam
from slipstream.tables.slices import Placement, slice_of


@pytest.mark.parametrize("rows", [1, 5, 100_000])
def test_numbers_follow_slice_and_key(rows, monkeypatch):
    monkeypatch.setattr("slipstream.tables.disk_records._FILE_BYTES", 1 << 20)
    numbers = SliceNumbering(rows, 100, Placement(1), 0)
    keys = torch.arange(rows)
    order = np.lexsort((keys.numpy(), slice_of(keys).numpy()))
    assert np.array_equal(numbers.numbers_of(torch.from_numpy(order)), np.arange(rows))
    assert torch.equal(numbers.keys_of(rows // 3, rows), torch.from_numpy(order[rows // 3 :]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_records_keep_every_bit(dtype):
    layout = RecordFormat(RowwiseAdam(), 5, dtype)
    rows = Rows(
        torch.randn(9, 5).to(dtype),
        {"m": torch.randn(9, 5).to(dtype), "v": torch.rand(9).to(dtype), "steps": torch.arange(9)},
    )
    back = layout.unpack(layout.pack(rows))
    assert torch.equal(back.weights_UD, rows.weights_UD) and back.weights_UD.dtype == dtype
    assert all(torch.equal(back.state[name], rows.state[name]) for name in rows.state)
    assert layout.bytes % 8 == 0
