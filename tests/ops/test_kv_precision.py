"""Keys and values in fewer bits: small errors, row by row, and stable when stored again."""

import pytest
import torch

from slipstream.ops.kv_precision import (
    PRECISIONS,
    STORED_DTYPES,
    read_rows,
    round_rows,
    store_rows,
)


def rows(seed=0, size=3.0):
    generator = torch.Generator().manual_seed(seed)
    return size * torch.randn(50, 2, 33, generator=generator)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_rows_are_stored_in_their_type_and_read_back(precision):
    stored, scales = store_rows(rows(), precision)
    assert stored.dtype == STORED_DTYPES[precision] and (scales is None) == (precision != "int8")
    assert torch.equal(read_rows(stored, scales), round_rows(rows(), precision))


def test_errors_stay_within_half_a_step():
    exact = rows()
    assert torch.equal(round_rows(exact, "fp32"), exact)
    halves = round_rows(exact, "fp16")
    assert ((halves - exact).abs() <= exact.abs() * 2**-11 + 2**-25).all()
    steps = exact.abs().amax(-1, keepdim=True) / 127 * (1 + 2**-7)
    assert ((round_rows(exact, "int8") - exact).abs() <= steps / 2 * (1 + 1e-6)).all()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_row_does_not_feel_its_neighbours(precision):
    alone = torch.cat([round_rows(each, precision) for each in rows().split(1)])
    assert torch.equal(alone, round_rows(rows(), precision))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_what_was_rounded_once_stays(precision):
    once = round_rows(rows(), precision)
    assert torch.equal(round_rows(once, precision), once)


def test_zeros_and_extremes_stay_finite():
    given = torch.zeros(4, 1, 8)
    given[1], given[2, 0, 3], given[3] = 1e-38, 1e6, -1e30
    for precision in ("fp16", "int8"):
        found = round_rows(given, precision)
        assert found.isfinite().all() and not found[0].any()
    assert round_rows(given, "fp16")[2, 0, 3] == 65504
