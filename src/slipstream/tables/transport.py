"""Formats in which rows and gradients travel between ranks: exact, or in 16 bits.

Touch this to add a format. Formats that round report their largest error.

    exact   the tables' own type
    bf16    rounded to eight significant bits
    fp16    eleven significant bits; every message is scaled by a power of two, chosen from its
            largest value and sent as its first element, so that small gradients do not vanish and
            large ones fit
    half    plain 16-bit rounding, clamped where it would overflow: the rounding of a row depends on
            the row alone, so that a rank can round its own rows in the same way (`half_rounded`)
"""

from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch

from slipstream.errors import SlipstreamError, did_you_mean
from slipstream.tables.communicator import Communicator

KINDS: dict[str, torch.dtype | None] = {
    "exact": None,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "half": torch.float16,
}
FP16_MAX = 65504.0
_FP16_TOP = 14  # messages are scaled so that their largest value lies below 2^15


@dataclass
class TransportError:
    """The largest rounding error so far, and the largest value that was sent."""

    largest: float = 0.0
    scale: float = 0.0

    def record(self, exact: torch.Tensor, rounded: torch.Tensor) -> None:
        """Take one message into account."""
        if exact.numel():
            self.largest = max(self.largest, float((exact - rounded).abs().max()))
            self.scale = max(self.scale, float(exact.abs().max()))


@dataclass
class Transport:
    """The wire format of an exchange; `errors` holds the rounding error per kind of message."""

    kind: str
    table_dtypes: list[torch.dtype]
    errors: dict[str, TransportError] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise SlipstreamError(
                f"unknown transport '{self.kind}'{did_you_mean(self.kind, KINDS)}"
            )

    @property
    def wide(self) -> torch.dtype:
        """Return the type that holds every table's rows exactly."""
        return reduce(torch.promote_types, self.table_dtypes, torch.float32)

    def swap(
        self,
        communicator: Communicator,
        flat: torch.Tensor,
        sizes_out: list[int],
        sizes_in: list[int],
        kind: str,
    ) -> torch.Tensor:
        """Swap a buffer of `wide` values with all ranks; returns `wide` values."""
        narrow = KINDS[self.kind]
        if narrow is None:
            return communicator.swap(flat, sizes_out, sizes_in, kind)
        packed = communicator.buffer("narrow out", flat.numel() + len(sizes_out), narrow)
        error = self.errors.setdefault(kind, TransportError())
        for message, values in _messages(packed, flat, sizes_out):
            exponent = _exponent(values) if self.kind == "fp16" else 0
            message[0] = exponent
            message[1:].copy_(
                half_rounded(values) if self.kind == "half" else values * 2.0**exponent
            )
            error.record(values, message[1:].to(values.dtype) * 2.0**-exponent)
        arrived = communicator.swap(
            packed, [n + 1 for n in sizes_out], [n + 1 for n in sizes_in], kind
        )
        received = communicator.buffer("narrow in", sum(sizes_in), self.wide)
        for message, values in _messages(arrived, received, sizes_in):
            torch.mul(message[1:].to(self.wide), 2.0 ** -float(message[0]), out=values)
        return received

    def report(self) -> dict[str, Any]:
        """Return per kind of message the largest rounding error, absolute and relative."""
        return {
            kind: {
                "max_error": error.largest,
                "relative": error.largest / error.scale if error.scale else 0.0,
            }
            for kind, error in self.errors.items()
        }


def half_rounded(values: torch.Tensor) -> torch.Tensor:
    """Round to the nearest values that 16 bits hold; the type stays."""
    return values.clamp(-FP16_MAX, FP16_MAX).to(torch.float16).to(values.dtype)


def _messages(
    packed: torch.Tensor, flat: torch.Tensor, sizes: list[int]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return per rank its message (the exponent is the first element) and its plain values."""
    return list(zip(packed.split([n + 1 for n in sizes]), flat.split(sizes), strict=True))


def _exponent(values: torch.Tensor) -> int:
    """Return the power of two that brings the largest value to just below 2^15."""
    largest = float(values.abs().max()) if values.numel() else 0.0
    if not 0.0 < largest < float("inf"):
        return 0
    exponent = int(torch.frexp(torch.tensor(largest, dtype=torch.float64)).exponent)
    return max(-100, min(100, _FP16_TOP - exponent + 1))
