"""Kernels take tensors and numbers as declared; anything else is refused before C sees it."""

import pytest
import torch

from slipstream.ops import native
from slipstream.ops.kernel_call import differentiable, kernel
from tests.support.operator_parity import needs_native


class Double(torch.autograd.Function):
    """Twice x, by a forward that keeps x."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


@needs_native
def test_a_kernel_reads_and_writes_the_tensors_it_is_given():
    z, out = torch.tensor([[1.0, -1.0]]), torch.empty(1, 2)
    kernel("ss_bias_silu")(z, None, out, 1, 2)
    torch.testing.assert_close(out, torch.nn.functional.silu(z))


@needs_native
@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ((torch.ones(2), None, torch.ones(2), 1), TypeError, "takes 5 arguments, got 4"),
        ((torch.ones(2).double(), None, torch.ones(2), 1, 2), TypeError, "takes torch.float32"),
        ((torch.ones(2, 2).T, None, torch.ones(4), 2, 2), ValueError, "must be contiguous"),
    ],
)
def test_a_wrong_argument_is_refused(arguments, error, sentence):
    with pytest.raises(error, match=sentence):
        kernel("ss_bias_silu")(*arguments)


def test_a_name_that_no_kernel_has_is_refused():
    with pytest.raises((KeyError, RuntimeError)):
        kernel("ss_nothing")


def test_without_kernels_the_way_out_is_named(monkeypatch):
    monkeypatch.setattr(native, "library", lambda: None)
    kernel.cache_clear()
    with pytest.raises(RuntimeError, match="use back-end 'reference'"):
        kernel("ss_dropout")


def test_a_function_is_recorded_only_where_gradients_are():
    call, x = differentiable(Double), torch.ones(3, requires_grad=True)
    call(x).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0, 2.0]
    with torch.no_grad():
        assert call(x).tolist() == [2.0, 2.0, 2.0] and not call(x).requires_grad
