"""How rows and gradients look on the wire: as they are, or in 16 bits, and then with the error
said.

`exact` sends the tables' own type. `bf16` rounds to eight significant bits; `fp16` keeps eleven and
scales every message by a power of two, chosen from its largest value and sent as its first element,
so that small gradients do not vanish and large ones fit. `half` is plain 16-bit rounding, clamped
where it would overflow: a row's rounding then hangs on nothing but the row, as it must where the
same row may also be rounded at home (`half_rounded`).
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
    """What rounding has cost so far: the largest error of a value, and the largest value it was
    found beside.
    """

    largest: float = 0.0
    scale: float = 0.0

    def note(self, exact: torch.Tensor, carried: torch.Tensor) -> None:
        if exact.numel():
            self.largest = max(self.largest, float((exact - carried).abs().max()))
            self.scale = max(self.scale, float(exact.abs().max()))


@dataclass
class Transport:
    """The wire format of an exchange; `errors` tells per kind of message what rounding has cost."""

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
        """The type that holds every table's rows exactly."""
        return reduce(torch.promote_types, self.table_dtypes, torch.float32)

    def swap(
        self,
        communicator: Communicator,
        flat: torch.Tensor,
        sizes_out: list[int],
        sizes_in: list[int],
        kind: str,
    ) -> torch.Tensor:
        """Swap a buffer of `wide` values; returns `wide` values."""
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
            error.note(values, message[1:].to(values.dtype) * 2.0**-exponent)
        arrived = communicator.swap(
            packed, [n + 1 for n in sizes_out], [n + 1 for n in sizes_in], kind
        )
        received = communicator.buffer("narrow in", sum(sizes_in), self.wide)
        for message, values in _messages(arrived, received, sizes_in):
            torch.mul(message[1:].to(self.wide), 2.0 ** -float(message[0]), out=values)
        return received

    def report(self) -> dict[str, Any]:
        """Per kind of message: the largest rounding error, absolute and relative to the largest
        value sent.
        """
        return {
            kind: {
                "max_error": error.largest,
                "relative": error.largest / error.scale if error.scale else 0.0,
            }
            for kind, error in self.errors.items()
        }


def half_rounded(values: torch.Tensor) -> torch.Tensor:
    """The nearest values that 16 bits hold, in the type they came in."""
    return values.clamp(-FP16_MAX, FP16_MAX).to(torch.float16).to(values.dtype)


def _messages(
    packed: torch.Tensor, flat: torch.Tensor, sizes: list[int]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per rank its message (one element of exponent in front) and its plain values."""
    return list(zip(packed.split([n + 1 for n in sizes]), flat.split(sizes), strict=True))


def _exponent(values: torch.Tensor) -> int:
    """The power of two that lifts (or lowers) the largest value to just below 2^15."""
    largest = float(values.abs().max()) if values.numel() else 0.0
    if not 0.0 < largest < float("inf"):
        return 0
    return max(
        -100,
        min(
            100,
            _FP16_TOP - int(torch.frexp(torch.tensor(largest, dtype=torch.float64)).exponent) + 1,
        ),
    )
