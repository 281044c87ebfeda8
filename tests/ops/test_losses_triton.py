"""Sampled softmax in Triton, interpreted on the CPU in its own process (the interpreter must be
chosen before triton loads).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).parent


def check_all_shapes() -> None:
    """Runs inside the interpreting process: outputs and gradients against the fp64 reference,
    twice, bit for bit.
    """
    from test_losses import Case

    from tests.support.operator_parity import assert_parity

    shapes = [
        (0, 3, 4, 2),
        (1, 1, 1, 0),
        (3, 2, 3, 1),
        (5, 9, 17, 33),
        (7, 301, 50, 40),
        (2, 40, 64, 128),
        (4, 4, 8, 5),
    ]
    for number, shape in enumerate(shapes):
        case = Case(*shape, seed=number)
        assert_parity(
            case.sampled(number % 2 == 0, 0.7),
            case.hidden_TD,
            case.rows_UD,
            backend="triton",
            thread_counts=(1,),
        )


def test_triton_equals_reference():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.environ["PYTHONPATH"]}
    code = "import test_losses_triton as t; t.check_all_shapes(); print('all shapes agree')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("all shapes agree")


def test_triton_without_an_accelerator_is_refused_with_a_sentence(monkeypatch):
    import torch

    from slipstream.ops import losses

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="needs an accelerator"):
        losses.sampled_softmax_loss(
            torch.ones(1, 2),
            torch.ones(1, 2),
            torch.tensor([0]),
            torch.zeros(1, 1, dtype=torch.int64),
            backend="triton",
        )
