"""Whole layers of HSTU, FuXi and SASRec without gradients: one compiled call for all of them.

The call of native/layer_pass.cpp holds no lock of the interpreter. Its reference is the layers' own
`forward` (slipstream.models), which also trains. New keys and values go to memory that the caller
keeps, or to scratch; those of a past are read where they are stored, in floats, halves or bytes.
Touch this together with native/layer_pass.h.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
import torch

from slipstream.ops import backend, native
from slipstream.ops.attention_types import TIME_UNIT, RelativeBias, time_bucket_borders
from slipstream.ops.kernel_call import kernel
from slipstream.ops.kv_precision import PRECISIONS, KVPrecision

Kind = Literal["hstu", "fuxi", "sasrec"]
KINDS: tuple[Kind, ...] = ("hstu", "fuxi", "sasrec")
ACTIVATIONS = ("relu", "gelu")


@dataclass(frozen=True)
class LayerTensors:
    """The weights of one layer; those its kind lacks are None."""

    project: torch.Tensor  # [F, D]: u, v, q, k one after the other; SASRec: v, q, k
    output: torch.Tensor
    output_bias: torch.Tensor
    norm: torch.Tensor | None = None
    norm_bias: torch.Tensor | None = None
    project_bias: torch.Tensor | None = None
    channels_norm: torch.Tensor | None = None
    inner_norm: torch.Tensor | None = None
    inner_norm_bias: torch.Tensor | None = None
    gate: torch.Tensor | None = None
    up: torch.Tensor | None = None
    up_bias: torch.Tensor | None = None
    down: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    bias: RelativeBias | None = None


@dataclass(frozen=True)
class LayerSizes:
    """What all layers of a model share."""

    kind: Kind
    width: int
    heads: int
    key_width: int
    value_width: int
    divisor: float = 1.0
    scale: float = 1.0
    eps: float = 1e-6
    activation: str = "gelu"


@dataclass(frozen=True)
class StoredPast:
    """The first `tokens` of a sequence in all layers, where they are stored.

    `addresses_L4` has the addresses of each layer's keys, values and their scales (0: none);
    `owner` keeps that memory alive.
    """

    tokens: int
    times_S: torch.Tensor
    addresses_L4: np.ndarray
    owner: object


@dataclass(frozen=True)
class PassTokens:
    """The tokens of a pass: their sequences, their times, and what comes before them.

    `k_offsets_B1` are those of the rows of keys and values that the pass has itself, where these
    begin before its tokens; `k_timestamps_S` are their times.
    """

    offsets_B1: torch.Tensor
    timestamps_T: torch.Tensor | None  # from when each token looks back
    k_timestamps_S: torch.Tensor | None
    num_candidates_B: torch.Tensor | None
    pasts: Sequence[StoredPast] | None = None
    k_offsets_B1: torch.Tensor | None = None


@dataclass(frozen=True)
class LayerRows:
    """One layer's rows of keys and values in a pass: memory of floats, and where rows are kept.

    `kept` are addresses, as in `StoredPast`, of where the new rows go in their stored form.
    """

    k_SHK: torch.Tensor
    v_SHV: torch.Tensor
    kept: tuple[int, int, int, int] = (0, 0, 0, 0)


_WEIGHTS = (
    "norm", "norm_bias", "project", "project_bias", "output", "output_bias", "channels_norm",
    "inner_norm", "inner_norm_bias", "gate", "up", "up_bias", "down", "down_bias",
)  # fmt: skip
_KEPT = ("stored_k", "stored_v", "stored_k_scales", "stored_v_scales")


class _Layer(ctypes.Structure):
    """`LayerWeights` of native/layer_pass.h, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _WEIGHTS),
        *((name, ctypes.c_void_p) for name in ("position", "time", "borders", "decay", "k", "v")),
        *((name, ctypes.c_void_p) for name in _KEPT),
        ("position_entries", ctypes.c_int64),
        ("time_entries", ctypes.c_int64),
    )


_POINTERS = (
    "x", "out", "q_offsets", "k_offsets", "q_times", "k_times", "candidates", "wanted",
    "past_tokens", "past_times", "past_rows", "layers",
)  # fmt: skip
_SIZES = (
    "first_layer", "num_layers", "model_layers", "sequences", "width", "heads", "key_width",
    "value_width", "inner",
)  # fmt: skip


class _Pass(ctypes.Structure):
    """`LayerPass` of native/layer_pass.h, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_float) for name in ("eps", "inverse_divisor", "scale", "time_unit")),
        *((name, ctypes.c_int32) for name in ("kind", "activation", "stored", "keys_only")),
        ("threads", ctypes.c_int32),
    )


def can_run(x_TD: torch.Tensor) -> bool:
    """Whether a pass over such tokens can be compiled: no gradients, and the native back-end."""
    return not torch.is_grad_enabled() and backend.choose(None, x_TD) == "native"


class CompiledLayers:
    """The layers of one model with the addresses of their weights, which must not move."""

    def __init__(self, sizes: LayerSizes, layers: Sequence[LayerTensors]) -> None:
        self.sizes, self._tensors = sizes, layers
        self._kept_alive: list[torch.Tensor] = []
        self._layers = (_Layer * len(layers))(*(self._layer(each) for each in layers))
        self._inner = 0 if layers[0].up is None else layers[0].up.shape[0]
        self.timed = any(each.bias is not None and each.bias.timed for each in layers)

    def __len__(self) -> int:
        return len(self._tensors)

    def run(
        self,
        x_TD: torch.Tensor,
        tokens: PassTokens,
        *,
        layers: range | None = None,
        rows: Sequence[LayerRows] | None = None,
        precision: KVPrecision = "fp32",
        wanted: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Run some layers, all unless given, and return the tokens after them.

        `rows` is each run layer's memory; None: the keys and values are not kept. `wanted` is how
        many last tokens of each sequence come back; of the others the last layer computes only
        keys and values.
        """
        layers = range(len(self)) if layers is None else layers
        x_TD = x_TD.contiguous()
        count = x_TD.shape[0] if wanted is None else sum(wanted)
        out_TD = torch.empty(count, x_TD.shape[1])
        chosen = (_Layer * len(layers))(*(self._layers[i] for i in layers))
        for place, each in enumerate(rows or ()):
            chosen[place].k, chosen[place].v = each.k_SHK.data_ptr(), each.v_SHV.data_ptr()
            for name, address in zip(_KEPT, each.kept, strict=True):
                setattr(chosen[place], name, address or None)
        self._call(x_TD, out_TD, tokens, chosen, layers.start, precision, wanted)
        return out_TD

    def _call(
        self,
        x_TD: torch.Tensor,
        out_TD: torch.Tensor,
        tokens: PassTokens,
        chosen: "ctypes.Array[_Layer]",
        first: int,
        precision: KVPrecision,
        wanted: Sequence[int] | None,
    ) -> None:
        sizes, pasts = self.sizes, tokens.pasts
        wanted_B = None if wanted is None else np.array(wanted, np.int64)
        past_tokens = past_times = past_rows = None
        if pasts is not None:
            past_tokens = np.array([past.tokens for past in pasts], np.int64)
            past_times = np.array([past.times_S.data_ptr() for past in pasts], np.int64)
            past_rows = np.stack([past.addresses_L4 for past in pasts])
        k_offsets = tokens.offsets_B1 if tokens.k_offsets_B1 is None else tokens.k_offsets_B1
        call = _Pass(
            x=native.address(x_TD, torch.float32),
            out=native.address(out_TD, torch.float32),
            q_offsets=native.address(tokens.offsets_B1, torch.int64),
            k_offsets=native.address(k_offsets, torch.int64),
            q_times=native.address(tokens.timestamps_T if self.timed else None, torch.int64),
            k_times=native.address(tokens.k_timestamps_S if self.timed else None, torch.int64),
            candidates=native.address(tokens.num_candidates_B, torch.int64),
            wanted=None if wanted_B is None else wanted_B.ctypes.data,
            past_tokens=None if past_tokens is None else past_tokens.ctypes.data,
            past_times=None if past_times is None else past_times.ctypes.data,
            past_rows=None if past_rows is None else past_rows.ctypes.data,
            layers=ctypes.addressof(chosen),
            first_layer=first,
            num_layers=len(chosen),
            model_layers=len(self),
            sequences=tokens.offsets_B1.numel() - 1,
            width=sizes.width,
            heads=sizes.heads,
            key_width=sizes.key_width,
            value_width=sizes.value_width,
            inner=self._inner,
            eps=sizes.eps,
            inverse_divisor=1.0 / sizes.divisor,
            scale=sizes.scale,
            time_unit=TIME_UNIT,
            kind=KINDS.index(sizes.kind),
            activation=ACTIVATIONS.index(sizes.activation),
            stored=PRECISIONS.index(precision),
            keys_only=wanted is not None and not sum(wanted),
            threads=torch.get_num_threads(),
        )
        if kernel("ss_layer_pass")(ctypes.byref(call)) != 0:
            raise MemoryError(
                "a pass through the layers could not get its scratch memory; use shorter sequences"
            )

    def _layer(self, tensors: LayerTensors) -> _Layer:
        bias = tensors.bias or RelativeBias()
        weights = {each.name: getattr(tensors, each.name) for each in fields(tensors)}
        del weights["bias"]
        weights |= {"position": bias.position_P, "time": bias.time_W, "decay": bias.decay_3}
        found = {name: self._address(tensor) for name, tensor in weights.items()}
        if bias.time_W is not None:
            borders_W = time_bucket_borders(bias.time_W.numel() - 1)
            found["borders"] = native.address(borders_W, torch.int64)
            found["time_entries"] = bias.time_W.numel()
        if bias.position_P is not None:
            found["position_entries"] = bias.position_P.numel()
        return _Layer(**found)

    def _address(self, tensor: torch.Tensor | None) -> int | None:
        if tensor is None:
            return None
        self._kept_alive.append(tensor.detach().contiguous())
        return native.address(self._kept_alive[-1], torch.float32)
