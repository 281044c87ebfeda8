"""FuXi-alpha's layer: three separate maps over the history, then a feed-forward part.

    [u, v, q, k] = SiLU(RMS(x) W), u three times as wide
    h = RMS([SiLU(scale q·k)/divisor v, time bias v, position bias v]) * u
    o = x + W_o dropout(h) + b_o         y = o + W_3 dropout(SiLU(W_1 RMS(o)) * W_2 RMS(o))

The time and position maps multiply the values directly, without the semantic map's SiLU and
divisor. With `time_encoding: functional` the time map is FuXi-gamma's function of the gap. Touch
this when FuXi's layer changes; what it shares with HSTU is in gated_attention.py.
"""

import torch
from torch import nn

from slipstream.models.backbone import KV, View
from slipstream.models.gated_attention import EPS, GatedAttention
from slipstream.models.model_config import ModelConfig
from slipstream.models.precision import linear, linear_silu
from slipstream.ops.attention import fuxi_attention
from slipstream.ops.layer_pass import LayerTensors
from slipstream.ops.pointwise import dropout, norm_gate_dropout, rms_norm


class SwiGLU(nn.Module):
    """The gated feed-forward part with its norm, without the residual."""

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
        dtype = view.product_dtype
        inner_TF = linear_silu(normed_TD, self.gate_FD, dtype=dtype) * linear(
            normed_TD, self.up_FD, dtype=dtype
        )
        inner_TF = dropout(
            inner_TF, p=self.p, seed=view.seed(index, 1), token_ids_T=view.token_ids_T
        )
        return linear(inner_TF, self.down_DF, dtype=dtype)


class FuXiLayer(GatedAttention):
    """One FuXi-alpha block."""

    operator, gates = staticmethod(fuxi_attention), 3  # a gate for each of the three maps

    def __init__(self, config: ModelConfig, index: int, capacity: int, divisor: float) -> None:
        super().__init__(config, index, capacity, divisor)
        self.norm_D = nn.Parameter(torch.ones(config.dim))
        self.channels_norm_F = nn.Parameter(torch.ones(self.gates * config.heads * config.dv))
        self.feed_forward = SwiGLU(config)

    def norm(self, x_TD: torch.Tensor) -> torch.Tensor:
        """RMS norm with weights."""
        return rms_norm(x_TD, self.norm_D, eps=EPS)

    def forward(
        self, x_TD: torch.Tensor, view: View, past: KV | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        u_TF, channels_TF, k_SHK, v_SHV = self.attend(x_TD, view, past)
        gated_TF = norm_gate_dropout(
            channels_TF,
            u_TF,
            norm="rms",
            eps=EPS,
            p=self.config.dropout,
            seed=view.seed(self.index),
            token_ids_T=view.token_ids_T,
            weight_F=self.channels_norm_F,
        )
        x_TD = self.project_out(gated_TF, view) + x_TD
        return x_TD + self.feed_forward(x_TD, view, self.index), (k_SHK, v_SHV)

    def tensors(self) -> LayerTensors:
        """The weights, as the compiled pass takes them."""
        inner = self.feed_forward
        return LayerTensors(
            self.uvqk_FD,
            self.output.weight,
            self.output.bias,
            norm=self.norm_D,
            channels_norm=self.channels_norm_F,
            inner_norm=inner.norm_D,
            gate=inner.gate_FD,
            up=inner.up_FD,
            down=inner.down_DF,
            bias=self.relative.bias(),
        )
