"""What HSTU, FuXi and SASRec share: the stack of layers, absolute positions, and cached prefixes.

A layer gets the tokens, the `View` (who sees whom, and when things happened) and, where a prefix
was computed before, its keys and values. A token's output depends only on what comes before it, so
a cached prefix stays exact whatever follows. Touch this when layers need something new from the
batch, or when what is cached of a prefix changes.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from slipstream.errors import SlipstreamError
from slipstream.models.inputs import Layout
from slipstream.models.jagged import (
    join_order,
    leading_tokens,
    offsets_from_lengths,
    sequence_and_place,
)
from slipstream.models.model_config import ModelConfig
from slipstream.ops.kv_precision import KVPrecision, round_rows
from slipstream.ops.layer_pass import (
    CompiledLayers,
    LayerRows,
    LayerSizes,
    LayerTensors,
    PassTokens,
    StoredPast,
    can_run,
)
from slipstream.ops.pointwise import dropout

_PURPOSES = 8  # dropout places a layer may have; each draws its own mask
_SEED_MASK = (1 << 63) - 1


@dataclass(frozen=True)
class KV:
    """One layer's keys and values of a cached prefix, with their times.

    Sequence b owns `offsets_B1[b]:offsets_B1[b + 1]`.
    """

    k_SHK: torch.Tensor
    v_SHV: torch.Tensor
    timestamps_S: torch.Tensor
    offsets_B1: torch.Tensor

    def first(self, keep_B: torch.Tensor) -> "KV":
        """Only the first `keep_B[b]` tokens of each sequence."""
        keep_B = torch.minimum(keep_B, self.offsets_B1.diff())
        rows = leading_tokens(self.offsets_B1, keep_B)
        return KV(
            self.k_SHK[rows],
            self.v_SHV[rows],
            self.timestamps_S[rows],
            offsets_from_lengths(keep_B),
        )


@dataclass(frozen=True)
class View:
    """What all layers of one forward pass share."""

    q_offsets_B1: torch.Tensor
    k_offsets_B1: torch.Tensor | None  # None: no prefix, the keys are the queries' tokens
    query_timestamps_T: torch.Tensor
    key_timestamps_S: torch.Tensor
    token_ids_T: torch.Tensor
    num_candidates_B: torch.Tensor | None
    dropout_seed: int | None
    join_S: torch.Tensor | None  # the order of cat([past, new]) by sequence; None: as it is
    product_dtype: torch.dtype | None = None  # of linear layers; None: that of the weights
    kv_precision: KVPrecision = "fp32"  # to which new keys and values are rounded

    def join(self, past: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Put each sequence's new rows behind its past ones."""
        both = torch.cat([past, new])
        return both if self.join_S is None else both.index_select(0, self.join_S)

    def seed(self, layer: int, purpose: int = 0) -> int | None:
        """The seed of one place where dropout happens; None where there is no dropout."""
        seed = self.dropout_seed
        return None if seed is None else dropout_seed(seed, layer, purpose)


class Layer(nn.Module, ABC):
    """A block of a backbone: computes tokens, and the keys and values of past and new tokens."""

    @abstractmethod
    def forward(
        self, x_TD: torch.Tensor, view: View, past: KV | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Compute the tokens of the next layer; called by the backbone."""

    @abstractmethod
    def keys_values(
        self, x_TD: torch.Tensor, view: View, past: KV | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Only the keys and values of `forward`, bit for bit: for the last layer of a prefix."""

    def tensors(self) -> LayerTensors | None:
        """The weights, as the compiled pass takes them; None where it does not know the layer."""
        return None

    def sizes(self) -> LayerSizes | None:
        """The sizes and constants of the layer, which are those of all layers of its model.

        None: the compiled pass does not know the layer, so `forward` also serves.
        """
        return None


def joined_heads(
    k_TF: torch.Tensor, v_TF: torch.Tensor, heads: int, view: View, past: KV | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values by head, each sequence's behind those of its past."""
    k_SHK, v_SHV = (
        round_rows(x_TF.unflatten(1, (heads, -1)), view.kv_precision) for x_TF in (k_TF, v_TF)
    )
    return (
        (k_SHK, v_SHV)
        if past is None
        else (view.join(past.k_SHK, k_SHK), view.join(past.v_SHV, v_SHV))
    )


class Backbone(nn.Module):
    """Positions, input dropout, layers; `capacity` is the longest stream of tokens.

    All candidates of a sequence count as one token.
    """

    def __init__(
        self,
        config: ModelConfig,
        capacity: int,
        layers: Sequence[Layer],
        final_norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.capacity = capacity
        self.layers = nn.ModuleList(layers)
        self.final_norm = final_norm
        # Of training only: without gradients a model computes as it is served.
        self.product_dtype: torch.dtype | None = None
        self.checkpoint_activations = False  # keep a layer's input, compute the rest again
        # Of inference only.
        self.kv_precision: KVPrecision = "fp32"
        self._compiled: CompiledLayers | None = None  # set by `freeze`
        self.positions_PD: nn.Parameter | None = None
        if config.position_embedding:
            self.positions_PD = nn.Parameter(torch.empty(capacity, config.dim))
            std = config.dim**-0.5
            nn.init.trunc_normal_(self.positions_PD, std=std, a=-2 * std, b=2 * std)

    def forward(
        self,
        x_TD: torch.Tensor,
        layout: Layout,
        past: list[KV] | None = None,
        keep_kv: bool = False,
    ) -> tuple[torch.Tensor, list[KV]]:
        """Hidden rows of the tokens, and with `keep_kv` each layer's keys and values.

        Candidates are not kept.
        """
        if past is not None:
            self._check_past(layout, past)
        if layout.dropout_seed is None and (layers := self.compiled(x_TD)) is not None:
            return self._forward_compiled(layers, x_TD, layout, past, keep_kv)
        view = make_view(layout, past)
        if not torch.is_grad_enabled():
            view = replace(view, kv_precision=self.kv_precision)
        elif self.product_dtype is not None:
            view = replace(view, product_dtype=self.product_dtype)
        x_TD = self.enter(x_TD, layout, None if past is None else past[0].offsets_B1.diff())
        if self.checkpoint_activations and torch.is_grad_enabled() and not keep_kv:
            return self.leave(self._checkpointed(x_TD, view, past)), []
        kept: list[KV] = []
        for index, layer in enumerate(self.layers):
            x_TD, (k_SHK, v_SHV) = layer(x_TD, view, None if past is None else past[index])
            if keep_kv:
                kept.append(_without_candidates(k_SHK, v_SHV, view))
        return self.leave(x_TD), kept

    def _checkpointed(self, x_TD: torch.Tensor, view: View, past: list[KV] | None) -> torch.Tensor:
        """Run the layers; the backward pass computes each again from its input.

        Dropout draws by counters, so the second time gives the same bits.
        """
        for index, layer in enumerate(self.layers):
            before = None if past is None else past[index]

            def run(x_TD: torch.Tensor, layer: nn.Module = layer, kv: KV | None = before) -> Any:
                return layer(x_TD, view, kv)[0]

            x_TD = checkpoint(run, x_TD, use_reentrant=False, preserve_rng_state=False)
        return x_TD

    # ---- without gradients ----------------------------------------------------------------------

    def freeze(self, kv_precision: KVPrecision = "fp32") -> None:
        """Prepare for inference: no weight changes or moves from here on.

        Keys and values are rounded to `kv_precision` before any token attends to them.
        """
        self.requires_grad_(False).eval()
        self.kv_precision = kv_precision
        example = next(self.parameters())
        with torch.no_grad():
            self._compiled = self._compile() if can_run(example) else None

    def compiled(self, x_TD: torch.Tensor) -> CompiledLayers | None:
        """The layers as one compiled call; None where gradients or another back-end are wanted."""
        if not can_run(x_TD):
            return None
        return self._compiled if self._compiled is not None else self._compile()

    def _compile(self) -> CompiledLayers | None:
        layers = [layer for layer in self.layers if isinstance(layer, Layer)]
        sizes, tensors = layers[0].sizes(), [layer.tensors() for layer in layers]
        known = [each for each in tensors if each is not None]
        return None if sizes is None or len(known) < len(tensors) else CompiledLayers(sizes, known)

    def _forward_compiled(
        self,
        layers: CompiledLayers,
        x_TD: torch.Tensor,
        layout: Layout,
        past: list[KV] | None,
        keep_kv: bool,
    ) -> tuple[torch.Tensor, list[KV]]:
        """`forward` in one compiled call; the past is read where it lies."""
        pasts = None if past is None else _stored_pasts(past)
        before_B = None if pasts is None else torch.tensor([each.tokens for each in pasts])
        x_TD = self.enter(x_TD, layout, before_B)
        rows = [self.new_rows(x_TD.shape[0]) for _ in self.layers] if keep_kv else None
        tokens = pass_tokens(layout, pasts)
        x_TD = layers.run(x_TD, tokens, rows=rows, precision=self.kv_precision)
        if rows is None:
            return self.leave(x_TD), []
        view = make_view(layout, past)
        kept = [
            _without_candidates(
                each.k_SHK if past is None else view.join(past[index].k_SHK, each.k_SHK),
                each.v_SHV if past is None else view.join(past[index].v_SHV, each.v_SHV),
                view,
            )
            for index, each in enumerate(rows)
        ]
        return self.leave(x_TD), kept

    def new_rows(self, count: int) -> LayerRows:
        """Memory for one layer's keys and values of `count` tokens."""
        heads, config = self.config.heads, self.config
        return LayerRows(
            torch.empty(count, heads, config.dqk), torch.empty(count, heads, config.dv)
        )

    # ---- before and after the layers -------------------------------------------------------------

    def _check_past(self, layout: Layout, past: list[KV]) -> None:
        if len(past) != len(self.layers):
            raise ValueError(
                f"a past of {len(past)} layers cannot continue a model of {len(self.layers)}"
            )
        sequences = past[0].offsets_B1.numel() - 1
        if sequences != layout.offsets_B1.numel() - 1:
            raise ValueError(
                f"a past of {sequences} sequences, but {layout.offsets_B1.numel() - 1} new ones"
            )

    def enter(
        self, x_TD: torch.Tensor, layout: Layout, before_B: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Tokens as the first layer reads them: with positions, after input dropout.

        `before_B` is how many tokens each sequence has before these.
        """
        if self.positions_PD is not None:
            x_TD = self._add_positions(x_TD, self.positions_PD, layout, before_B)
        if layout.dropout_seed is None:
            return x_TD
        seed = dropout_seed(layout.dropout_seed, len(self.layers))
        return dropout(x_TD, p=self.config.input_dropout, seed=seed, token_ids_T=layout.token_ids_T)

    def leave(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Tokens as a head reads them, after the last layer."""
        return x_TD if self.final_norm is None else self.final_norm(x_TD)

    def _add_positions(
        self,
        x_TD: torch.Tensor,
        positions_PD: torch.Tensor,
        layout: Layout,
        before_B: torch.Tensor | None,
    ) -> torch.Tensor:
        """Add each token's position in its sequence; all candidates stand after the history."""
        if layout.offsets_B1.numel() == 2 and not torch.is_grad_enabled():
            before = 0 if before_B is None else int(before_B[0])
            count = x_TD.shape[0]
            last = 0 if layout.num_candidates_B is None else int(layout.num_candidates_B[0])
            self._check_capacity(before + count - max(0, last - 1))
            x_TD = x_TD.clone()
            x_TD[: count - last] += positions_PD[before : before + count - last]
            if last:
                x_TD[count - last :] += positions_PD[before + count - last]
            return x_TD
        sequence_T, position_T = sequence_and_place(layout.offsets_B1)
        end_B = layout.offsets_B1.diff()
        if before_B is not None:
            position_T, end_B = position_T + before_B[sequence_T], end_B + before_B
        if layout.num_candidates_B is not None:
            position_T = torch.minimum(position_T, (end_B - layout.num_candidates_B)[sequence_T])
        if position_T.numel():
            self._check_capacity(int(position_T.max()) + 1)
        return x_TD + nn.functional.embedding(position_T, positions_PD)

    def _check_capacity(self, tokens: int) -> None:
        if tokens > self.capacity:
            raise SlipstreamError(
                f"a sequence of {tokens} tokens does not fit the model's {self.capacity} "
                "positions; cut histories to the model's max_len, or train with a larger one or "
                "without position_embedding"
            )


def dropout_seed(seed: int, layer: int, purpose: int = 0) -> int:
    """The seed of one place where dropout happens, from that of a batch."""
    return (seed + layer * _PURPOSES + purpose) & _SEED_MASK


def pass_tokens(layout: Layout, pasts: Sequence[StoredPast] | None) -> PassTokens:
    """The tokens of a batch as a compiled pass takes them."""
    return PassTokens(
        layout.offsets_B1,
        layout.query_timestamps_T,
        layout.timestamps_T,
        layout.num_candidates_B,
        pasts,
    )


def _stored_pasts(past: list[KV]) -> list[StoredPast]:
    """Each sequence's past in all layers, where it lies."""
    layers = [(kv.k_SHK.contiguous(), kv.v_SHV.contiguous()) for kv in past]
    starts = past[0].offsets_B1.tolist()
    return [
        StoredPast(
            end - begin,
            past[0].timestamps_S[begin:],
            np.array([[k[begin:].data_ptr(), v[begin:].data_ptr(), 0, 0] for k, v in layers]),
            (layers, past),
        )
        for begin, end in itertools.pairwise(starts)
    ]


def make_view(layout: Layout, past: list[KV] | None) -> View:
    """The view of a batch, behind its cached prefix where there is one."""
    if past is None:
        k_offsets_B1, key_timestamps_S, join_S = None, layout.timestamps_T, None
    else:
        past_offsets_B1 = past[0].offsets_B1
        k_offsets_B1, order_S = join_order(past_offsets_B1, layout.offsets_B1)
        join_S = order_S if past_offsets_B1.numel() > 2 else None
        key_timestamps_S = torch.cat([past[0].timestamps_S, layout.timestamps_T]).index_select(
            0, order_S
        )
    return View(
        q_offsets_B1=layout.offsets_B1,
        k_offsets_B1=k_offsets_B1,
        query_timestamps_T=layout.query_timestamps_T,
        key_timestamps_S=key_timestamps_S,
        token_ids_T=layout.token_ids_T,
        num_candidates_B=layout.num_candidates_B,
        dropout_seed=layout.dropout_seed,
        join_S=join_S,
    )


def _without_candidates(k_SHK: torch.Tensor, v_SHV: torch.Tensor, view: View) -> KV:
    offsets_B1 = view.q_offsets_B1 if view.k_offsets_B1 is None else view.k_offsets_B1
    # Copied, or the cache would keep alive the whole projection of which k and v are views.
    whole = KV(k_SHK.contiguous(), v_SHV.contiguous(), view.key_timestamps_S, offsets_B1)
    return (
        whole
        if view.num_candidates_B is None
        else whole.first(offsets_B1.diff() - view.num_candidates_B)
    )
