"""The Triton kernels, interpreted on the CPU, equal the reference: output and every gradient.

The interpreter is chosen by an environment variable before triton is imported, so the cases run in
one process of their own.
"""

import importlib.util

import pytest
import torch

from slipstream.ops.attention import RelativeBias, hstu_attention
from tests.support.processes import run_python

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed on this machine"
)

CODE = """
import torch
from tests.support.attention_cases import Case, assert_close, distances
from slipstream.ops import attention_triton
torch.set_num_threads(1)
cases = [
    Case(lengths=()),
    Case(lengths=(0, 1, 0)),
    Case(lengths=(33, 32, 2)),
    Case(lengths=(65, 7), heads=1, key_width=25, value_width=5, positions=1, buckets=128),
    Case(lengths=(20, 3), position=False),
    Case(lengths=(20, 3), time=False, contiguous=False),
    Case(lengths=(20, 3), position=False, time=False, window=4),
    Case(lengths=(40, 9), window=1),
    Case(lengths=(35, 9, 0), candidates=True, sorted_times=False),
    Case(lengths=(40, 9), candidates=True, tail=33, window=12, seed=3),
    Case(lengths=(33, 0, 1, 40), functional=True),
    Case(lengths=(20, 3), functional=True, position=False, sorted_times=False),
    Case(lengths=(40, 9), functional=True, candidates=True, tail=33, window=12),
]
for operator in ("hstu", "fuxi"):
    for case in cases:
        assert_close(Case(**{**case.__dict__, "operator": operator}), "triton")
attention_triton.BLOCK = 16
assert_close(Case(lengths=(40, 9)), "triton")
from dataclasses import replace
honest = attention_triton._launch
def spoilt(kernel, a, *rest):
    honest(kernel, replace(a, scale=a.scale * 1.001), *rest)
attention_triton._launch = spoilt
assert max(distances(Case(), "triton").values()) > 1e-4, "the comparison cannot fail"
print("equal")
"""


@pytest.mark.system
def test_interpreted_kernels_equal_the_reference():
    assert run_python(CODE, TRITON_INTERPRET="1") == "equal"


def test_without_an_accelerator_or_the_interpreter_it_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x = torch.ones(2, 1, 4)
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        hstu_attention(
            x, x, x, torch.tensor([0, 2]), divisor=1.0, bias=RelativeBias(), backend="triton"
        )
