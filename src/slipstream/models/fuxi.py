"""FuXi-alpha's layer: three separate maps over the history, then a feed-forward part.

    [u, v, q, k] = SiLU(RMS(x) W), u three times as wide
    h = RMS([SiLU(scale q·k)/divisor v, time bias v, position bias v]) * u
    o = x + W_o dropout(h) + b_o         y = o + W_3 dropout(SiLU(W_1 RMS(o)) * W_2 RMS(o))

The time and position maps multiply the values raw: they do not share the semantic map's SiLU or divisor.
"""

import torch
from torch import nn

from slipstream.models.backbone import KV, Layer, View, joined_heads
from slipstream.models.config import ModelConfig
from slipstream.models.hstu import EPS, WEIGHT_STD, project
from slipstream.models.relative import RelativeTables
from slipstream.ops.attention import fuxi_attention
from slipstream.ops.neighbours import dropout, linear_silu, norm_gate_dropout, rms_norm

_CHANNELS = 3


class SwiGLU(nn.Module):
    """Gated feed-forward part with its norm; adds nothing of the residual."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        inner = max(1, round(config.dim * config.ffn_multiplier))
        self.p = config.dropout
        self.norm_D = nn.Parameter(torch.ones(config.dim))
        self.gate_FD = nn.Parameter(torch.empty(inner, config.dim))
        self.up_FD = nn.Parameter(torch.empty(inner, config.dim))
        self.down_DF = nn.Parameter(torch.empty(config.dim, inner))
        for weight in (self.gate_FD, self.up_FD, self.down_DF):
            nn.init.xavier_uniform_(weight)

    def forward(self, x_TD: torch.Tensor, view: View, index: int) -> torch.Tensor:
        normed_TD = rms_norm(x_TD, self.norm_D, eps=EPS)
        inner_TF = linear_silu(normed_TD, self.gate_FD) * nn.functional.linear(normed_TD, self.up_FD)
        inner_TF = dropout(inner_TF, p=self.p, seed=view.seed(index, 1), token_ids_T=view.token_ids_T)
        return nn.functional.linear(inner_TF, self.down_DF)


class FuXiLayer(Layer):
    """One FuXi-alpha block."""

    def __init__(self, config: ModelConfig, index: int, capacity: int, divisor: float) -> None:
        super().__init__()
        self.config, self.index, self.divisor = config, index, divisor
        value_width, key_width = config.heads * config.dv, config.heads * config.dqk
        self.widths = [_CHANNELS * value_width, value_width, key_width, key_width]
        self.norm_D = nn.Parameter(torch.ones(config.dim))
        self.uvqk_FD = nn.Parameter(torch.empty(sum(self.widths), config.dim).normal_(std=WEIGHT_STD))
        self.channels_norm_F = nn.Parameter(torch.ones(_CHANNELS * value_width))
        self.output = nn.Linear(_CHANNELS * value_width, config.dim)
        nn.init.xavier_uniform_(self.output.weight)
        nn.init.zeros_(self.output.bias)
        self.relative = RelativeTables(config, capacity)
        self.feed_forward = SwiGLU(config)

    def forward(self, x_TD: torch.Tensor, view: View, past: KV | None) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        heads = self.config.heads
        u_TF, v_TF, q_TF, k_TF = project(rms_norm(x_TD, self.norm_D, eps=EPS), self.uvqk_FD, self.widths)
        k_SHK, v_SHV = joined_heads(k_TF, v_TF, heads, view, past)
        timestamps_T, k_timestamps_S = self.relative.times(view)
        channels_T3HV = fuxi_attention(
            q_TF.unflatten(1, (heads, -1)),
            k_SHK,
            v_SHV,
            view.q_offsets_B1,
            view.k_offsets_B1,
            divisor=self.divisor,
            scale=self.config.scale or 1.0,
            bias=self.relative.bias(),
            timestamps_T=timestamps_T,
            k_timestamps_S=k_timestamps_S,
            num_candidates_B=view.num_candidates_B,
        )
        gated_TF = norm_gate_dropout(
            channels_T3HV.flatten(1),
            u_TF,
            norm="rms",
            eps=EPS,
            p=self.config.dropout,
            seed=view.seed(self.index),
            token_ids_T=view.token_ids_T,
            weight_F=self.channels_norm_F,
        )
        x_TD = self.output(gated_TF) + x_TD
        return x_TD + self.feed_forward(x_TD, view, self.index), (k_SHK, v_SHV)

    def keys_values(self, x_TD: torch.Tensor, view: View, past: KV | None) -> tuple[torch.Tensor, torch.Tensor]:
        _, v_FD, _, k_FD = self.uvqk_FD.split(self.widths)
        normed_TD = rms_norm(x_TD, self.norm_D, eps=EPS)
        return joined_heads(linear_silu(normed_TD, k_FD), linear_silu(normed_TD, v_FD), self.config.heads, view, past)
