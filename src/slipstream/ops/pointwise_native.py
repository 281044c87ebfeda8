"""The pointwise operators through the compiled kernels of native/pointwise.cpp.

Matrix products stay torch's; what surrounds them is one pass. Backward computes dropout masks again
from (seed, token, column). Operands are checked by `slipstream.ops.pointwise`. Touch this together
with those kernels.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from slipstream.ops.kernel_call import apply, differentiable, kernel

_CACHE_LINE = 64  # bytes


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Return the same values in one piece from a cache line on.

    torch's products may round differently where memory begins elsewhere, as in the middle of a
    weight whose parts have odd widths.
    """
    x = x.contiguous()
    return x if x.data_ptr() % _CACHE_LINE == 0 else x.clone()


class _LinearSilu(torch.autograd.Function):
    """Keeps the projection before SiLU; the bias gradient is a column sum of its gradient."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: torch.Tensor, weight_FD: torch.Tensor, bias_F: torch.Tensor | None
    ) -> torch.Tensor:
        x_TD, weight_FD = _aligned(x_TD), _aligned(weight_FD)
        z_TF = torch.mm(x_TD, weight_FD.T)
        out_TF = torch.empty_like(z_TF)
        kernel("ss_bias_silu")(
            z_TF, None if bias_F is None else bias_F.contiguous(), out_TF, *z_TF.shape
        )
        ctx.save_for_backward(x_TD, weight_FD, z_TF)
        return out_TF

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TF: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_TD, weight_FD, z_TF = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        dz_TF = torch.empty_like(z_TF)
        kernel("ss_silu_backward")(z_TF, grad_TF.contiguous(), dz_TF, z_TF.numel())
        grad_x_TD = dz_TF @ weight_FD if needs_x else None
        grad_weight_FD = dz_TF.T @ x_TD if needs_weight else None
        return grad_x_TD, grad_weight_FD, dz_TF.sum(dim=0) if needs_bias else None


_linear_silu = differentiable(_LinearSilu)


def linear_silu(
    x_TD: torch.Tensor, weight_FD: torch.Tensor, bias_F: torch.Tensor | None
) -> torch.Tensor:
    """silu(x W^T + b)."""
    return _linear_silu(x_TD, weight_FD, bias_F)


def _drop(x_TD: torch.Tensor, p: float, seed: int, token_ids_T: torch.Tensor) -> torch.Tensor:
    x_TD, out_TD = x_TD.contiguous(), torch.empty(x_TD.shape)
    masks = x_TD.new_empty(torch.get_num_threads(), x_TD.shape[1])
    kernel("ss_dropout")(x_TD, token_ids_T, seed, p, 1.0 / (1.0 - p), out_TD, *x_TD.shape, masks)
    return out_TD


class _Dropout(torch.autograd.Function):
    """Backward applies the same mask to the gradient."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: torch.Tensor, p: float, seed: int, token_ids_T: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(token_ids_T.contiguous())
        ctx.p, ctx.seed = p, seed
        return _drop(x_TD, p, seed, token_ids_T.contiguous())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _drop(grad_TD, ctx.p, ctx.seed, *ctx.saved_tensors), None, None, None


def dropout(x_TD: torch.Tensor, p: float, seed: int, token_ids_T: torch.Tensor) -> torch.Tensor:
    """Zero with probability p, scale the rest by 1 / (1 - p)."""
    return apply(_Dropout, x_TD, p, seed, token_ids_T)


class _NormGateDropout(torch.autograd.Function):
    """Keeps x, gate and two moments a token; backward computes everything else again."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TF: torch.Tensor,
        gate_TF: torch.Tensor | None,
        weight_F: torch.Tensor | None,
        token_ids_T: torch.Tensor | None,
        centred: bool,
        eps: float,
        p: float,
        seed: int | None,
    ) -> torch.Tensor:
        operands = [
            None if x is None else x.contiguous()
            for x in (x_TF, gate_TF, weight_F, token_ids_T if seed is not None else None)
        ]
        tokens, width = x_TF.shape
        out_TF, moments_T2 = torch.empty(x_TF.shape), x_TF.new_empty(tokens, 2)
        masks = x_TF.new_empty(torch.get_num_threads(), width)
        drop = (seed or 0, p, 1.0 / (1.0 - p))
        kernel("ss_norm_gate_forward")(
            *operands, *drop, centred, eps, out_TF, moments_T2, tokens, width, masks
        )
        ctx.save_for_backward(*operands, moments_T2)
        ctx.drop, ctx.centred = drop, centred
        return out_TF

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TF: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_TF, gate_TF, weight_F, token_ids_T, moments_T2 = ctx.saved_tensors
        (tokens, width), threads = x_TF.shape, torch.get_num_threads()
        grad_x_TF = torch.empty_like(x_TF)
        grad_gate_TF = None if gate_TF is None else torch.empty_like(gate_TF)
        partial = None if weight_F is None else x_TF.new_zeros(threads, width)
        scratch = x_TF.new_empty(threads, 2, width)
        kernel("ss_norm_gate_backward")(
            x_TF, gate_TF, weight_F, token_ids_T, *ctx.drop, ctx.centred, moments_T2,
            grad_TF.contiguous(), grad_x_TF, grad_gate_TF, partial, tokens, width, scratch,
        )  # fmt: skip
        grad_weight_F = None if partial is None else partial.sum(dim=0)
        return (grad_x_TF, grad_gate_TF, grad_weight_F, *[None] * 5)


_norm_gate_dropout = differentiable(_NormGateDropout)


def norm_gate_dropout(
    x_TF: torch.Tensor,
    gate_TF: torch.Tensor | None,
    weight_F: torch.Tensor | None,
    token_ids_T: torch.Tensor | None,
    *,
    norm: str,
    eps: float,
    p: float,
    seed: int | None,
) -> torch.Tensor:
    """dropout(norm(x) * weight * gate); without a gate it is a plain norm."""
    return _norm_gate_dropout(x_TF, gate_TF, weight_F, token_ids_T, norm == "layer", eps, p, seed)
