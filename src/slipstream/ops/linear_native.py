"""Linear layers of small models through native/linear.cpp: parts, bias and SiLU in one pass.

Wider layers are left to torch's products, which are faster there. Operands are checked by
`slipstream.ops.pointwise`. Touch this together with that kernel.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from slipstream.ops.kernel_call import NoContext, kernel

MOST_DEPTH, MOST_WIDTH = 256, 1024  # of a weight [width, depth] that this is faster for


def fits(weight_FD: torch.Tensor) -> bool:
    """Return whether a weight is narrow enough."""
    return weight_FD.shape[0] <= MOST_WIDTH and 0 < weight_FD.shape[1] <= MOST_DEPTH


def _addresses(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([each.data_ptr() for each in tensors], dtype=torch.int64)


def _check_memory(failed: int) -> None:
    if failed:
        raise MemoryError("a linear layer could not get its scratch memory")


class _Linear(torch.autograd.Function):
    """Keeps the sums before SiLU; backward reads them and the input once."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: torch.Tensor,
        weight_FD: torch.Tensor,
        bias_F: torch.Tensor | None,
        widths: Sequence[int],
        silu: bool,
        keep: bool,
    ) -> tuple[torch.Tensor, ...]:
        x_TD, weight_FD = x_TD.contiguous(), weight_FD.contiguous()
        bias_F = None if bias_F is None else bias_F.contiguous()
        (tokens, depth), widths_P = x_TD.shape, torch.tensor(widths)
        parts = tuple(x_TD.new_empty(tokens, width) for width in widths)
        z_TF = x_TD.new_empty(tokens, weight_FD.shape[0]) if keep and silu else None
        _check_memory(
            kernel("ss_linear_forward")(
                x_TD, weight_FD, bias_F, widths_P, len(widths), tokens, depth, silu, z_TF,
                _addresses(parts),
            )
        )  # fmt: skip
        if keep:
            ctx.save_for_backward(x_TD, weight_FD, z_TF, widths_P)
            ctx.silu = silu
        return parts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_TD, weight_FD, z_TF, widths_P = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grads = tuple(grad.contiguous() for grad in grads)
        d_x_TD = torch.empty_like(x_TD) if needs_x else None
        d_weight_FD = torch.empty_like(weight_FD) if needs_weight else None
        d_bias_F = x_TD.new_empty(weight_FD.shape[0]) if needs_bias else None
        _check_memory(
            kernel("ss_linear_backward")(
                x_TD, weight_FD, widths_P, len(grads), *x_TD.shape, ctx.silu, z_TF,
                _addresses(grads), d_x_TD, d_weight_FD, d_bias_F,
            )
        )  # fmt: skip
        return d_x_TD, d_weight_FD, d_bias_F, None, None, None


def linear(
    x_TD: torch.Tensor,
    weight_FD: torch.Tensor,
    bias_F: torch.Tensor | None,
    widths: Sequence[int],
    *,
    silu: bool,
) -> tuple[torch.Tensor, ...]:
    """f(x W^T + b) cut into parts of these widths, each contiguous."""
    if torch.is_grad_enabled():
        found: tuple[torch.Tensor, ...] = _Linear.apply(x_TD, weight_FD, bias_F, widths, silu, True)  # type: ignore[no-untyped-call]
        return found
    return _Linear.forward(NoContext(), x_TD, weight_FD, bias_F, widths, silu, False)
