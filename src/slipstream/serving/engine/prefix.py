"""A prefix: the cached keys and values of a user's history, and the memory they lie in.

Its key is (model version, user, number of behaviours, digest of them, layout version): a prefix is
exact or it is not reused.

    buffer   | times | layer 0: keys, values (and their scales) | layer 1: ... |   `capacity` tokens

A prefix never changes once it is filled: a ranking request keeps its own tokens (recent behaviours,
candidates) elsewhere, and several may read one prefix. Keys and values are stored in floats, or in
fewer bits (`ops/kv_precision.py`); then every pass rounds them alike, so that a hit, a miss, an
extension and a reload still agree. The last `hold` behaviours of a history are not cached; they
are kept as behaviours and computed again with what follows. A token that looks back from the next
one's time is not final yet, and with eight or more new rows plain matrix products round as in the
full pass, so a hit equals it bit for bit. Touch this when the layout of a prefix changes, and raise
LAYOUT_VERSION then.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from slipstream.models.backbone import KV
from slipstream.models.model_config import ModelConfig
from slipstream.ops.kv_precision import (
    SCALE_DTYPE,
    STORED_DTYPES,
    KVPrecision,
    read_rows,
    store_rows,
)
from slipstream.ops.layer_pass import StoredPast
from slipstream.serving.engine.encoding import EncodedHistory

LAYOUT_VERSION = 2
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
    """Sizes of one token's keys and values in all layers, and how they are stored."""

    layers: int
    heads: int
    dqk: int
    dv: int
    precision: KVPrecision = "fp32"

    @classmethod
    def of(cls, config: ModelConfig, precision: KVPrecision = "fp32") -> "KVShape":
        """Return the sizes of a model."""
        return cls(config.blocks, config.heads, config.dqk, config.dv, precision)

    @property
    def parts(self) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        """What a layer stores of a token: dtype and shape of keys, values and their scales."""
        stored = STORED_DTYPES[self.precision]
        found = [(stored, (self.heads, self.dqk)), (stored, (self.heads, self.dv))]
        scale: tuple[torch.dtype, tuple[int, ...]] = (SCALE_DTYPE, (self.heads,))
        return [*found, scale, scale] if self.precision == "int8" else [*found]

    @property
    def token_bytes(self) -> int:
        """The bytes of one more token."""
        return 8 + self.layers * sum(_bytes(dtype, shape) for dtype, shape in self.parts)

    def nbytes(self, capacity: int) -> int:
        """Return the bytes of a buffer for `capacity` tokens, alignment included."""
        per_layer = sum(_aligned(capacity * _bytes(dtype, shape)) for dtype, shape in self.parts)
        return _aligned(8 * capacity) + self.layers * per_layer

    def buffer(self, capacity: int, memory: torch.Tensor | None = None) -> "PrefixBuffer":
        """Return a buffer for `capacity` tokens laid out in `memory`; None allocates it."""
        return PrefixBuffer(self, capacity, memory)


def _bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return dtype.itemsize * math.prod(shape)


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
        self.layers: list[tuple[torch.Tensor, ...]] = []  # keys, values (and their scales) of each
        at = _aligned(8 * capacity)
        for _ in range(shape.layers):
            parts = []
            for dtype, widths in shape.parts:
                size = capacity * _bytes(dtype, widths)
                parts.append(memory[at : at + size].view(dtype).view(capacity, *widths))
                at += _aligned(size)
            self.layers.append(tuple(parts))
        self._addresses_L4 = np.zeros((shape.layers, 4), np.int64)
        for layer, parts_of in enumerate(self.layers):
            self._addresses_L4[layer, : len(parts_of)] = [each.data_ptr() for each in parts_of]
        self._strides_4 = np.zeros(4, np.int64)
        self._strides_4[: len(shape.parts)] = [_bytes(*part) for part in shape.parts]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The times, then what every layer stores."""
        return [self.times_S, *(part for parts in self.layers for part in parts)]

    def copy_tokens(self, source: "PrefixBuffer", tokens: int) -> None:
        """Copy the first `tokens` of another buffer."""
        for layer in range(self.shape.layers):
            self.copy_layer(source, tokens, layer)

    def copy_layer(self, source: "PrefixBuffer", tokens: int, layer: int) -> None:
        """Copy one layer's first `tokens`; layer 0 brings the times too."""
        if layer == 0:
            self.times_S[:tokens] = source.times_S[:tokens]
        for ours, theirs in zip(self.layers[layer], source.layers[layer], strict=True):
            ours[:tokens] = theirs[:tokens]

    def stored(self, tokens: int) -> StoredPast:
        """Return the first `tokens` as a compiled pass reads them."""
        return StoredPast(tokens, self.times_S, self._addresses_L4, self)

    def addresses(self, layer: int, token: int) -> tuple[int, int, int, int]:
        """Return where a token's keys, values and their scales lie in one layer; 0: none."""
        k, v, k_scales, v_scales = (self._addresses_L4[layer] + token * self._strides_4).tolist()
        return k, v, k_scales, v_scales

    def layer(self, index: int, tokens: int) -> KV:
        """Return a layer's first `tokens` as the model's own type: a view of floats, or a copy."""
        keys, values, *scales = (part[:tokens] for part in self.layers[index])
        if self.shape.precision != "fp32":
            keys, values = (
                read_rows(rows, scales[place] if scales else None)
                for place, rows in enumerate((keys, values))
            )
        return KV(keys, values, self.times_S[:tokens], torch.tensor([0, tokens]))

    def write(self, index: int, at: int, k_THK: torch.Tensor, v_THV: torch.Tensor) -> None:
        """Store one layer's keys and values from token `at` on."""
        for place, rows in enumerate((k_THK, v_THV)):
            stored, scales = store_rows(rows, self.shape.precision)
            self.layers[index][place][at : at + rows.shape[0]] = stored
            if scales is not None:
                self.layers[index][2 + place][at : at + rows.shape[0]] = scales


class CachedTokens(NamedTuple):
    """The first tokens of a buffer."""

    buffer: PrefixBuffer
    tokens: int


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
    def cached(self) -> CachedTokens:
        """The tokens in the buffer."""
        return CachedTokens(self.buffer, self.tokens)

    @property
    def nbytes(self) -> int:
        """The bytes of what is cached."""
        return self.buffer.shape.token_bytes * self.tokens

    def key(self, user: str) -> PrefixKey:
        """Return the key under which this prefix may be kept for a user."""
        return PrefixKey(self.version, user, self.behaviours, self.digest)
