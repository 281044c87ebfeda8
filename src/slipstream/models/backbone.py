"""What HSTU, FuXi and SASRec share: the stack of layers, absolute positions, and cached prefixes.

A layer gets the tokens, the `View` (who sees whom, and when things happened) and, where a prefix
was computed before, its keys and values. A token's output depends only on what comes before it, so
a cached prefix stays exact whatever follows. Touch this when layers need something new from the
batch, or when what is cached of a prefix changes.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from slipstream.errors import SlipstreamError
from slipstream.models.inputs import Layout
from slipstream.models.jagged import (
    join_order,
    leading_tokens,
    offsets_from_lengths,
    sequence_and_place,
)
from slipstream.models.model_config import ModelConfig
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

    def join(self, past: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Put each sequence's new rows behind its past ones."""
        both = torch.cat([past, new])
        return both if self.join_S is None else both.index_select(0, self.join_S)

    def seed(self, layer: int, purpose: int = 0) -> int | None:
        """The seed of one place where dropout happens; None where there is no dropout."""
        return (
            None
            if self.dropout_seed is None
            else (self.dropout_seed + layer * _PURPOSES + purpose) & _SEED_MASK
        )


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


def joined_heads(
    k_TF: torch.Tensor, v_TF: torch.Tensor, heads: int, view: View, past: KV | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values by head, each sequence's behind those of its past."""
    k_SHK, v_SHV = k_TF.unflatten(1, (heads, -1)), v_TF.unflatten(1, (heads, -1))
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
        if past is not None and len(past) != len(self.layers):
            raise ValueError(
                f"a past of {len(past)} layers cannot continue a model of {len(self.layers)}"
            )
        view = make_view(layout, past)
        x_TD = self.enter(x_TD, view)
        kept: list[KV] = []
        for index, layer in enumerate(self.layers):
            x_TD, (k_SHK, v_SHV) = layer(x_TD, view, None if past is None else past[index])
            if keep_kv:
                kept.append(_without_candidates(k_SHK, v_SHV, view))
        return self.leave(x_TD), kept

    def enter(self, x_TD: torch.Tensor, view: View) -> torch.Tensor:
        """Tokens as the first layer reads them: with positions, after input dropout."""
        if self.positions_PD is not None:
            x_TD = x_TD + nn.functional.embedding(self._positions_T(view), self.positions_PD)
        seed = view.seed(len(self.layers))
        return dropout(x_TD, p=self.config.input_dropout, seed=seed, token_ids_T=view.token_ids_T)

    def leave(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Tokens as a head reads them, after the last layer."""
        return x_TD if self.final_norm is None else self.final_norm(x_TD)

    def _positions_T(self, view: View) -> torch.Tensor:
        """Each new token's position in its sequence; all candidates stand after the history."""
        sequence_T, place_T = sequence_and_place(view.q_offsets_B1)
        k_offsets_B1 = view.q_offsets_B1 if view.k_offsets_B1 is None else view.k_offsets_B1
        total_B = k_offsets_B1.diff()
        position_T = place_T + (total_B - view.q_offsets_B1.diff())[sequence_T]
        if view.num_candidates_B is not None:
            position_T = torch.minimum(position_T, (total_B - view.num_candidates_B)[sequence_T])
        if position_T.numel() and int(position_T.max()) >= self.capacity:
            raise SlipstreamError(
                f"a sequence of {int(position_T.max()) + 1} tokens does not fit the model's "
                f"{self.capacity} positions; "
                "cut histories to the model's max_len, or train with a larger one or without "
                "position_embedding"
            )
        return position_T


def make_view(layout: Layout, past: list[KV] | None) -> View:
    """The view of a batch, behind its cached prefix where there is one."""
    if past is None:
        k_offsets_B1, key_timestamps_S, join_S = None, layout.timestamps_T, None
    else:
        past_offsets_B1 = past[0].offsets_B1
        if past_offsets_B1.numel() != layout.offsets_B1.numel():
            raise ValueError(
                f"a past of {past_offsets_B1.numel() - 1} sequences, but "
                f"{layout.offsets_B1.numel() - 1} new ones"
            )
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
