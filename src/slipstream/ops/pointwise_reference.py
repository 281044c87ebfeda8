"""The pointwise operators in plain PyTorch; the compiled ones are tested against it.

Touch this only when what an operator computes changes.
"""

import torch
import torch.nn.functional as F

from slipstream.ops import counter_random


def keep_mask(seed: int, token_ids_T: torch.Tensor, columns: int, p: float) -> torch.Tensor:
    """bool [T, columns]: what dropout keeps; compared in fp32, whatever the values' precision."""
    uniform_TC = counter_random.random_uniform(seed, token_ids_T, columns)
    return uniform_TC >= torch.tensor(p, dtype=torch.float32, device=token_ids_T.device)


def dropout(x_TD: torch.Tensor, p: float, seed: int, token_ids_T: torch.Tensor) -> torch.Tensor:
    """Zero with probability p, scale the rest by 1 / (1 - p)."""
    return x_TD * keep_mask(seed, token_ids_T, x_TD.shape[1], p) * (1.0 / (1.0 - p))


def linear_silu(
    x_TD: torch.Tensor, weight_FD: torch.Tensor, bias_F: torch.Tensor | None
) -> torch.Tensor:
    """silu(x W^T + b)."""
    return F.silu(F.linear(x_TD, weight_FD, bias_F))


def normalise(x_TF: torch.Tensor, norm: str, eps: float) -> torch.Tensor:
    """Layer norm (mean and variance over F) or RMS norm, without parameters."""
    if norm == "layer":
        x_TF = x_TF - x_TF.mean(dim=1, keepdim=True)
    return x_TF * torch.rsqrt(x_TF.square().mean(dim=1, keepdim=True) + eps)


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight."""
    y_TD = normalise(x_TD, "rms", eps)
    return y_TD if weight_D is None else y_TD * weight_D


def norm_gate_dropout(
    x_TF: torch.Tensor,
    gate_TF: torch.Tensor,
    weight_F: torch.Tensor | None,
    token_ids_T: torch.Tensor | None,
    *,
    norm: str,
    eps: float,
    p: float,
    seed: int | None,
) -> torch.Tensor:
    """dropout(norm(x) * weight * gate)."""
    y_TF = normalise(x_TF, norm, eps)
    if weight_F is not None:
        y_TF = y_TF * weight_F
    y_TF = y_TF * gate_TF
    return y_TF if seed is None or token_ids_T is None else dropout(y_TF, p, seed, token_ids_T)
