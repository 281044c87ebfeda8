"""HSTU's layer: pointwise SiLU attention with relative bias, gated by u.

    [u, v, q, k] = SiLU(LN(x) W)      A = SiLU(scale q·k + position bias + time bias) / divisor, causal
    y = x + W_o dropout(u * LN(A v)) + b_o

Norms carry no weights of their own. The divisor is a constant of the model, never a batch's length: see docs/architecture.md.
"""

import torch
from torch import nn

from slipstream.models.backbone import KV, Layer, View, joined_heads
from slipstream.models.config import ModelConfig
from slipstream.models.relative import RelativeTables
from slipstream.ops.attention import hstu_attention
from slipstream.ops.neighbours import layer_norm, linear_silu, norm_gate_dropout

EPS = 1e-6
WEIGHT_STD = 0.02


def project(x_TD: torch.Tensor, weight_FD: torch.Tensor, widths: list[int]) -> list[torch.Tensor]:
    """SiLU(x W) in parts of these widths. Cutting the weight, not the product, leaves every part in one piece for attention."""
    return [linear_silu(x_TD, part_FD) for part_FD in weight_FD.split(widths)]


class HSTULayer(Layer):
    """One HSTU block."""

    def __init__(self, config: ModelConfig, index: int, capacity: int, divisor: float) -> None:
        super().__init__()
        self.config, self.index, self.divisor = config, index, divisor
        self.widths = [config.heads * config.dv] * 2 + [config.heads * config.dqk] * 2
        self.uvqk_FD = nn.Parameter(torch.empty(sum(self.widths), config.dim).normal_(std=WEIGHT_STD))
        self.output = nn.Linear(config.heads * config.dv, config.dim)
        nn.init.xavier_uniform_(self.output.weight)
        nn.init.zeros_(self.output.bias)
        self.relative = RelativeTables(config, capacity)

    def forward(self, x_TD: torch.Tensor, view: View, past: KV | None) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        heads = self.config.heads
        u_TF, v_TF, q_TF, k_TF = project(layer_norm(x_TD, eps=EPS), self.uvqk_FD, self.widths)
        k_SHK, v_SHV = joined_heads(k_TF, v_TF, heads, view, past)
        timestamps_T, k_timestamps_S = self.relative.times(view)
        attended_THV = hstu_attention(
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
            attended_THV.flatten(1),
            u_TF,
            norm="layer",
            eps=EPS,
            p=self.config.dropout,
            seed=view.seed(self.index),
            token_ids_T=view.token_ids_T,
        )
        return self.output(gated_TF) + x_TD, (k_SHK, v_SHV)

    def keys_values(self, x_TD: torch.Tensor, view: View, past: KV | None) -> tuple[torch.Tensor, torch.Tensor]:
        _, v_FD, _, k_FD = self.uvqk_FD.split(self.widths)
        normed_TD = layer_norm(x_TD, eps=EPS)
        return joined_heads(linear_silu(normed_TD, k_FD), linear_silu(normed_TD, v_FD), self.config.heads, view, past)
