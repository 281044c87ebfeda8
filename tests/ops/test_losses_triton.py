"""Sampled softmax in Triton, interpreted on the CPU, equals the reference.

The interpreter is chosen by an environment variable before triton is imported, so the cases run in
one process of their own.
"""

import pytest
import torch

from slipstream.ops import losses
from tests.support.processes import run_python

pytest.importorskip("triton")

CODE = """
from tests.support.loss_cases import LossCase
from tests.support.operator_parity import assert_parity

shapes = [
    (0, 3, 4, 2), (1, 1, 1, 0), (3, 2, 3, 1), (5, 9, 17, 33), (7, 301, 50, 40), (2, 40, 64, 128),
    (4, 4, 8, 5),
]
for number, shape in enumerate(shapes):
    case = LossCase(*shape, seed=number)
    loss = case.sampled(number % 2 == 0, 0.7)
    assert_parity(loss, case.hidden_TD, case.rows_UD, backend="triton", thread_counts=(1,))
print("equal")
"""


@pytest.mark.system
def test_the_interpreted_loss_equals_the_reference():
    assert run_python(CODE, TRITON_INTERPRET="1") == "equal"


def test_the_loss_is_refused_without_an_accelerator_or_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    negatives_TR = torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="needs an accelerator"):
        losses.sampled_softmax_loss(
            torch.ones(1, 2), torch.ones(1, 2), torch.tensor([0]), negatives_TR, backend="triton"
        )
