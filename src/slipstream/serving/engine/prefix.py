"""A prefix: the cached keys and values of a user's history, and the memory they lie in.

Its key is (model version, user, number of behaviours, digest of them, layout version): a prefix is
exact or it is not reused.

    buffer   | times | layer 0 keys | layer 0 values | layer 1 keys | ...   `capacity` tokens each
    tokens   |<---- cached ---->|<- room: what a ranking request appends ->|

A ranking request writes its own tokens (recent behaviours, candidates) behind the cached ones,
where attention reads them, so nothing of the prefix is copied. The last `hold` behaviours of a
history are not cached; they are kept as behaviours and computed again with what follows. A token
that looks back from the next one's time is not final yet, and with eight or more new rows the
matrix products round as in the full pass, so a hit equals it bit for bit. Touch this when the
layout of a prefix changes, and raise LAYOUT_VERSION then.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from slipstream.models.backbone import KV
from slipstream.models.model_config import ModelConfig
from slipstream.serving.engine.encoding import EncodedHistory

LAYOUT_VERSION = 1
MIN_ROWS = 8  # rows below which a matrix product may round differently
_ALIGN = 64


class PrefixKey(NamedTuple):
    """What a prefix was computed from; equal keys mean equal scores."""

    version: str
    user: str
    behaviours: int
    digest: bytes
    layout: int = LAYOUT_VERSION


def _aligned(size: int) -> int:
    return (size + _ALIGN - 1) // _ALIGN * _ALIGN


@dataclass(frozen=True)
class KVShape:
    """Sizes of one token's keys and values in all layers (fp32)."""

    layers: int
    heads: int
    dqk: int
    dv: int

    @classmethod
    def of(cls, config: ModelConfig) -> "KVShape":
        """Return the sizes of a model."""
        return cls(config.blocks, config.heads, config.dqk, config.dv)

    @property
    def token_bytes(self) -> int:
        """The bytes of one more token."""
        return 8 + 4 * self.layers * self.heads * (self.dqk + self.dv)

    def nbytes(self, capacity: int) -> int:
        """Return the bytes of a buffer for `capacity` tokens, alignment included."""
        per_layer = _aligned(4 * capacity * self.heads * self.dqk) + _aligned(
            4 * capacity * self.heads * self.dv
        )
        return _aligned(8 * capacity) + self.layers * per_layer


class PrefixBuffer:
    """Memory for `capacity` tokens of one sequence: times, and keys and values of every layer."""

    def __init__(self, shape: KVShape, capacity: int, memory: torch.Tensor | None = None) -> None:
        """Lay the buffer out in `memory`: flat uint8, 64-byte aligned; None allocates it."""
        needed = shape.nbytes(capacity)
        if memory is None:
            memory = torch.empty(needed, dtype=torch.uint8)
        if memory.numel() < needed:
            raise ValueError(
                f"a buffer of {capacity} tokens needs {needed} bytes, got {memory.numel()}"
            )
        self.shape, self.capacity, self.nbytes = shape, capacity, needed
        self.times_S = memory[: 8 * capacity].view(torch.int64)
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        at = _aligned(8 * capacity)
        for _ in range(shape.layers):
            for found, width in ((self.keys, shape.dqk), (self.values, shape.dv)):
                size = 4 * capacity * shape.heads * width
                found.append(
                    memory[at : at + size].view(torch.float32).view(capacity, shape.heads, width)
                )
                at += _aligned(size)

    def copy_tokens(self, source: "PrefixBuffer", tokens: int) -> None:
        """Copy the first `tokens` of another buffer."""
        for layer in range(self.shape.layers):
            self.copy_layer(source, tokens, layer)

    def copy_layer(self, source: "PrefixBuffer", tokens: int, layer: int) -> None:
        """Copy one layer's first `tokens`; layer 0 brings the times too."""
        if layer == 0:
            self.times_S[:tokens] = source.times_S[:tokens]
        self.keys[layer][:tokens] = source.keys[layer][:tokens]
        self.values[layer][:tokens] = source.values[layer][:tokens]

    def layer(self, index: int, tokens: int) -> KV:
        """Return a layer's first `tokens` as the model's own type, a view."""
        offsets_B1 = torch.tensor([0, tokens])
        return KV(
            self.keys[index][:tokens],
            self.values[index][:tokens],
            self.times_S[:tokens],
            offsets_B1,
        )


@dataclass(frozen=True)
class Prefix:
    """The first `behaviours` of a history: `tokens` cached in `buffer`, and the `held` rest."""

    version: str
    behaviours: int
    digest: bytes
    tokens: int
    held: EncodedHistory
    buffer: PrefixBuffer

    @property
    def cached_behaviours(self) -> int:
        """The behaviours whose tokens are in the buffer."""
        return self.behaviours - len(self.held)

    @property
    def nbytes(self) -> int:
        """The bytes of what is cached, without the room behind it."""
        return self.buffer.shape.token_bytes * self.tokens

    def key(self, user: str) -> PrefixKey:
        """Return the key under which this prefix may be kept for a user."""
        return PrefixKey(self.version, user, self.behaviours, self.digest)

    def past(self) -> list[KV]:
        """Return the keys and values of every layer."""
        return [self.buffer.layer(index, self.tokens) for index in range(self.buffer.shape.layers)]
