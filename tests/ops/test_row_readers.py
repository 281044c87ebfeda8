"""Rows read in parts are the rows of the whole, to the last bit."""

import pytest
import torch

from slipstream.ops import row_readers
from slipstream.ops.row_readers import NormalizedRows, TensorRows, normalize_rows


@pytest.mark.parametrize("tile", [1, 7, 5_000])
@pytest.mark.parametrize("width", [1, 20, 64, 130])
def test_parts_of_normalised_rows_are_parts_of_the_whole(tile, width, monkeypatch):
    rows_ND = torch.randn(1_003, width, generator=torch.Generator().manual_seed(width))
    rows_ND[5] = 0
    whole_ND = torch.nn.functional.normalize(rows_ND, dim=-1, eps=1e-6)
    monkeypatch.setattr(row_readers, "TILE", tile)
    reader = NormalizedRows(TensorRows(rows_ND))
    assert reader.shape == (1_003, width)
    begins, parts = zip(*reader.tiles(), strict=True)
    assert begins == tuple(range(0, 1_003, tile))
    assert torch.equal(torch.cat(parts), whole_ND)
    some_C = torch.tensor([5, 1_002, 0, 0])
    assert torch.equal(reader.take(some_C), whole_ND[some_C])
    assert torch.equal(normalize_rows(rows_ND[7]), whole_ND[7])
