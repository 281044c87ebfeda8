"""Linear layers in 16 bits: products in bf16, everything around them in the type of the weights.

Master weights, rows, norms, attention and losses keep their type, so the operators' back-ends see
what they always see; only the operands and the result of a product are rounded. Touch this when
another part of a model computes with fewer bits.
"""

from collections.abc import Sequence

import torch
from torch import nn

from slipstream.ops import pointwise


def linear(
    x_TD: torch.Tensor,
    weight_FD: torch.Tensor,
    bias_F: torch.Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x W^T + b, multiplied in `dtype` (None: that of x) and returned in the type of x."""
    if dtype is None:
        return pointwise.linear(x_TD, weight_FD, bias_F)
    product_TF = nn.functional.linear(x_TD.to(dtype), weight_FD.to(dtype)).to(x_TD.dtype)
    return product_TF if bias_F is None else product_TF + bias_F


def linear_silu(
    x_TD: torch.Tensor, weight_FD: torch.Tensor, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """silu(x W^T), multiplied in `dtype` (None: that of x) and returned in the type of x."""
    if dtype is None:
        return pointwise.linear_silu(x_TD, weight_FD)
    return nn.functional.silu(linear(x_TD, weight_FD, dtype=dtype))


def linear_silu_parts(
    x_TD: torch.Tensor,
    weight_FD: torch.Tensor,
    widths: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, ...]:
    """`linear_silu` cut into parts of these widths, each contiguous."""
    if dtype is None:
        return pointwise.linear_silu_parts(x_TD, weight_FD, widths)
    parts = weight_FD.split(list(widths))
    return tuple(linear_silu(x_TD, part_FD, dtype=dtype) for part_FD in parts)
