"""Keys and values in fewer bits: how rows are stored, and what is read back. The plain reference.

A row is one head of one token. fp16 rounds every value; int8 keeps whole multiples of the row's
scale, which is its largest magnitude over 127, rounded up to bfloat16. What is stored of a row
depends on that row alone, so it does not matter in which pass it was computed. The compiled passes
(native/stored_rows.h) store the same. Touch this when rows are stored in another form.
"""

from typing import Literal

import torch

KVPrecision = Literal["fp32", "fp16", "int8"]
PRECISIONS: tuple[KVPrecision, ...] = ("fp32", "fp16", "int8")
STORED_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "int8": torch.int8}
SCALE_DTYPE = torch.bfloat16
_LARGEST = {"fp16": 65504.0, "int8": 127.0}
_NOTHING = 1e-30  # a row with no larger magnitude is stored as zeros


def store_rows(
    x_THK: torch.Tensor, precision: KVPrecision
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return rows in their stored form, with the scale of each where they have one."""
    if precision == "fp32":
        return x_THK, None
    largest = _LARGEST[precision]
    if precision == "fp16":
        return x_THK.clamp(-largest, largest).half(), None
    most_TH = x_THK.abs().amax(-1)
    bits_TH = (most_TH / largest).contiguous().view(torch.int32)
    upper_TH = torch.where(most_TH > _NOTHING, (bits_TH + 0xFFFF) >> 16, 0).to(torch.int16)
    scales_TH = upper_TH.view(SCALE_DTYPE)
    steps_TH1 = scales_TH.float().unsqueeze(-1)
    inverse_TH1 = torch.where(steps_TH1 > 0, 1.0 / steps_TH1, 0.0)
    # In double, the product is exact and rounded once, as a fused multiply-add rounds it.
    codes = (x_THK.double() * inverse_TH1.double()).round().clamp(-largest, largest)
    return codes.to(torch.int8), scales_TH


def read_rows(stored: torch.Tensor, scales_TH: torch.Tensor | None) -> torch.Tensor:
    """Return stored rows as floats."""
    if scales_TH is None:
        return stored.float()
    return stored.float() * scales_TH.float().unsqueeze(-1)


def round_rows(x_THK: torch.Tensor, precision: KVPrecision) -> torch.Tensor:
    """Return what is read back of rows that are stored."""
    return x_THK if precision == "fp32" else read_rows(*store_rows(x_THK, precision))
