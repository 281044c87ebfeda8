"""Items drawn without state: both back-ends alike, by their weights, the same in any batch."""

import pytest
import torch

from slipstream.ops.item_draws import draw_items
from tests.support.operator_parity import needs_native

ROWS_T = torch.arange(3000) * 977 - 5
HALF, ALIAS = torch.tensor([1 << 31, 1 << 32, 0, 1 << 30]), torch.tensor([1, 0, 3, 0])


@needs_native
@pytest.mark.parametrize("table", [{}, {"threshold_N": HALF, "alias_N": ALIAS}])
def test_native_and_reference_draw_the_same_items(table):
    native, reference = (
        draw_items(11, ROWS_T, 9, 4, backend=backend, **table)
        for backend in ("native", "reference")
    )
    assert torch.equal(native, reference)


def test_a_row_draws_the_same_items_in_any_batch():
    whole = draw_items(5, ROWS_T, 7, 1000)
    assert torch.equal(draw_items(5, ROWS_T[100:110], 7, 1000), whole[100:110])
    assert not torch.equal(draw_items(6, ROWS_T, 7, 1000), whole)


def test_items_are_drawn_with_the_probabilities_of_the_table():
    counts = torch.bincount(
        draw_items(3, ROWS_T, 40, 4, threshold_N=HALF, alias_N=ALIAS).flatten(), minlength=4
    )
    # A quarter of the draws each: half of 0 stays, all of 1, none of 2, a quarter of 3.
    expected = torch.tensor([0.5 + 0.75, 0.5 + 1.0, 0.0, 0.25 + 1.0]) / 4
    torch.testing.assert_close(counts / counts.sum(), expected, atol=0.01, rtol=0)
    uniform = torch.bincount(draw_items(3, ROWS_T, 40, 4).flatten(), minlength=4)
    torch.testing.assert_close(uniform / uniform.sum(), torch.full((4,), 0.25), atol=0.01, rtol=0)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"rows_T": ROWS_T.int()}, TypeError),
        ({"count": 0}, ValueError),
        ({"below": (1 << 31) + 1}, ValueError),
        ({"threshold_N": HALF}, ValueError),
        ({"threshold_N": HALF[:3], "alias_N": ALIAS[:3]}, ValueError),
        ({"backend": "triton"}, ValueError),
    ],
)
def test_wrong_operands_are_refused(change, error):
    with pytest.raises(error, match=r"\w+ \w+"):
        draw_items(**{"seed": 1, "rows_T": ROWS_T, "count": 2, "below": 4} | change)
