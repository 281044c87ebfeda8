"""The operators around attention: linear, linear + SiLU, norm x gate x dropout, RMS norm, dropout.

Dropout is stateless: whether a value is kept depends on (seed, token id, column) only. Its mask is
never stored, backward computes it again, and a token has the same mask in every micro-batch and on
every rank. Touch this when one of these operators gets another argument.
"""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F

from slipstream.ops import backend as backends
from slipstream.ops import linear_native, operand_checks, pointwise_native, pointwise_reference

Norm = Literal["layer", "rms"]


def linear_silu(
    x_TD: torch.Tensor,
    weight_FD: torch.Tensor,
    bias_F: torch.Tensor | None = None,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """silu(x W^T + b) for x [T, D], W [F, D], b [F]."""
    _check_linear(x_TD, weight_FD, bias_F)
    if backends.choose(backend, x_TD) == "native":
        if linear_native.fits(weight_FD):
            width = weight_FD.shape[0]
            return linear_native.linear(x_TD, weight_FD, bias_F, [width], silu=True)[0]
        return pointwise_native.linear_silu(x_TD, weight_FD, bias_F)
    return pointwise_reference.linear_silu(x_TD, weight_FD, bias_F)


def linear_silu_parts(
    x_TD: torch.Tensor,
    weight_FD: torch.Tensor,
    widths: Sequence[int],
    *,
    backend: str | None = None,
) -> tuple[torch.Tensor, ...]:
    """silu(x W^T) cut into parts of these widths, each contiguous."""
    _check_linear(x_TD, weight_FD, None)
    if sum(widths) != weight_FD.shape[0] or min(widths, default=0) < 0:
        raise ValueError(f"parts of {list(widths)} do not cut a width of {weight_FD.shape[0]}")
    if backends.choose(backend, x_TD) == "native" and linear_native.fits(weight_FD):
        return linear_native.linear(x_TD, weight_FD, None, widths, silu=True)
    # The weight is split, not the product: so every part is contiguous.
    return tuple(
        linear_silu(x_TD, part_FD, backend=backend) for part_FD in weight_FD.split(list(widths))
    )


def linear(
    x_TD: torch.Tensor,
    weight_FD: torch.Tensor,
    bias_F: torch.Tensor | None = None,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """x W^T + b for x [T, D], W [F, D], b [F]."""
    _check_linear(x_TD, weight_FD, bias_F)
    if backends.choose(backend, x_TD) == "native" and linear_native.fits(weight_FD):
        width = weight_FD.shape[0]
        return linear_native.linear(x_TD, weight_FD, bias_F, [width], silu=False)[0]
    return F.linear(x_TD, weight_FD, bias_F)


def _check_linear(x_TD: torch.Tensor, weight_FD: torch.Tensor, bias_F: torch.Tensor | None) -> None:
    operand_checks.floating("x", x_TD, dims=2)
    operand_checks.floating("weight", weight_FD, dims=2)
    operand_checks.like("weight", weight_FD, "x", x_TD, (weight_FD.shape[0], x_TD.shape[1]))
    if bias_F is not None:
        operand_checks.like("bias", bias_F, "weight", weight_FD, (weight_FD.shape[0],))


def layer_norm(x_TD: torch.Tensor, *, eps: float = 1e-6) -> torch.Tensor:
    """Layer norm over D without parameters (torch's own kernel is already one pass)."""
    operand_checks.floating("x", x_TD, dims=2)
    operand_checks.not_negative("eps", eps)
    return F.layer_norm(x_TD, (x_TD.shape[1],), eps=eps) if x_TD.shape[1] else x_TD


def rms_norm(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    backend: str | None = None,
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps), times an optional weight."""
    operand_checks.floating("x", x_TD, dims=2)
    operand_checks.not_negative("eps", eps)
    if weight_D is not None:
        operand_checks.like("weight", weight_D, "x", x_TD, (x_TD.shape[1],))
    if backends.choose(backend, x_TD) == "native":
        return pointwise_native.norm_gate_dropout(
            x_TD, None, weight_D, None, norm="rms", eps=eps, p=0.0, seed=None
        )
    return pointwise_reference.rms_norm(x_TD, weight_D, eps)


def norm_gate_dropout(
    x_TF: torch.Tensor,
    gate_TF: torch.Tensor,
    *,
    norm: Norm = "layer",
    eps: float = 1e-6,
    p: float = 0.0,
    seed: int | None = None,
    token_ids_T: torch.Tensor | None = None,
    weight_F: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """dropout(norm(x) * weight * gate); without a seed (or with p = 0) nothing is dropped."""
    operand_checks.floating("x", x_TF, dims=2)
    operand_checks.like("gate", gate_TF, "x", x_TF, tuple(x_TF.shape))
    operand_checks.not_negative("eps", eps)
    if norm not in ("layer", "rms"):
        raise ValueError(f"norm must be 'layer' or 'rms', got {norm!r}")
    if weight_F is not None:
        operand_checks.like("weight", weight_F, "x", x_TF, (x_TF.shape[1],))
    seed = _checked_seed(x_TF, p, seed, token_ids_T)
    serve = pointwise_native if backends.choose(backend, x_TF) == "native" else pointwise_reference
    out_TF: torch.Tensor = serve.norm_gate_dropout(
        x_TF, gate_TF, weight_F, token_ids_T, norm=norm, eps=eps, p=p, seed=seed
    )
    return out_TF


def dropout(
    x_TD: torch.Tensor,
    *,
    p: float,
    seed: int | None,
    token_ids_T: torch.Tensor | None,
    backend: str | None = None,
) -> torch.Tensor:
    """Zero values with probability p and scale the rest by 1 / (1 - p).

    Without a seed, or with p = 0, returns x itself.
    """
    operand_checks.floating("x", x_TD, dims=2)
    seed = _checked_seed(x_TD, p, seed, token_ids_T)
    chosen = backends.choose(backend, x_TD)
    if seed is None or token_ids_T is None:
        return x_TD
    serve = pointwise_native if chosen == "native" else pointwise_reference
    out_TD: torch.Tensor = serve.dropout(x_TD, p, seed, token_ids_T)
    return out_TD


def _checked_seed(
    x_TD: torch.Tensor, p: float, seed: int | None, token_ids_T: torch.Tensor | None
) -> int | None:
    """The seed to drop with, or None where nothing is dropped."""
    operand_checks.probability("p", p)
    if seed is not None and not -(1 << 63) <= seed < 1 << 63:
        raise ValueError(f"seed must fit into 64 bits, got {seed}")
    if token_ids_T is not None:
        operand_checks.integers(
            "token_ids", token_ids_T, shape=(x_TD.shape[0],), device=x_TD.device
        )
    if seed is None or p == 0.0:
        return None
    if token_ids_T is None:
        raise ValueError(
            "dropout needs token_ids_T, from which its mask is drawn; pass one int64 id per token"
        )
    return seed
