"""SASRec's layer in its pre-norm form: causal softmax attention, then a feed-forward part.

    [v, q, k] = W LN(x) + b
    x = x + dropout(W_o softmax(q·k / sqrt(dqk)) v)
    x = x + dropout(W_2 dropout(act(W_1 LN(x))))

Order comes from the absolute position embedding alone; a norm follows the last block. Touch this
when SASRec's layer changes.
"""

import torch
from torch import nn

from slipstream.models.backbone import KV, Layer, View, joined_heads
from slipstream.models.gated_attention import EPS
from slipstream.models.model_config import ModelConfig
from slipstream.models.precision import linear
from slipstream.ops.causal_attention import softmax_attention
from slipstream.ops.layer_pass import LayerSizes, LayerTensors
from slipstream.ops.pointwise import dropout


class SASRecLayer(Layer):
    """One SASRec block."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.config, self.index = config, index
        inner = max(1, round(config.dim * config.ffn_multiplier))
        self.widths = [config.heads * config.dv] + [config.heads * config.dqk] * 2
        self.attention_norm = nn.LayerNorm(config.dim, eps=EPS)
        self.vqk = nn.Linear(config.dim, sum(self.widths))
        self.output = nn.Linear(config.heads * config.dv, config.dim)
        self.inner_norm = nn.LayerNorm(config.dim, eps=EPS)
        self.up = nn.Linear(config.dim, inner)
        self.down = nn.Linear(inner, config.dim)
        self.activation = nn.functional.relu if config.activation == "relu" else nn.functional.gelu
        for layer in (self.vqk, self.output, self.up, self.down):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(
        self, x_TD: torch.Tensor, view: View, past: KV | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        v_TF, q_TF, k_TF = _linear(self.vqk, self.attention_norm(x_TD), view).split(
            self.widths, dim=1
        )
        k_SHK, v_SHV = joined_heads(k_TF, v_TF, self.config.heads, view, past)
        attended_THV = softmax_attention(
            q_TF.unflatten(1, (self.config.heads, -1)),
            k_SHK,
            v_SHV,
            view.q_offsets_B1,
            view.k_offsets_B1,
            num_candidates_B=view.num_candidates_B,
            scale=self.config.scale or self.config.dqk**-0.5,
        )
        x_TD = x_TD + self._dropout(_linear(self.output, attended_THV.flatten(1), view), view, 0)
        inner_TF = self._dropout(
            self.activation(_linear(self.up, self.inner_norm(x_TD), view)), view, 1
        )
        return x_TD + self._dropout(_linear(self.down, inner_TF, view), view, 2), (k_SHK, v_SHV)

    def keys_values(
        self, x_TD: torch.Tensor, view: View, past: KV | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Only the keys and values of `forward`."""
        # In one product as in `forward`, so that both round alike.
        v_TF, _, k_TF = _linear(self.vqk, self.attention_norm(x_TD), view).split(self.widths, dim=1)
        return joined_heads(k_TF, v_TF, self.config.heads, view, past)

    def sizes(self) -> LayerSizes:
        """The sizes and constants of the layer."""
        config = self.config
        return LayerSizes(
            "sasrec",
            config.dim,
            config.heads,
            config.dqk,
            config.dv,
            scale=config.scale or config.dqk**-0.5,
            eps=EPS,
            activation=config.activation,
        )

    def tensors(self) -> LayerTensors:
        """The weights, as the compiled pass takes them."""
        return LayerTensors(
            self.vqk.weight,
            self.output.weight,
            self.output.bias,
            norm=self.attention_norm.weight,
            norm_bias=self.attention_norm.bias,
            project_bias=self.vqk.bias,
            inner_norm=self.inner_norm.weight,
            inner_norm_bias=self.inner_norm.bias,
            up=self.up.weight,
            up_bias=self.up.bias,
            down=self.down.weight,
            down_bias=self.down.bias,
        )

    def _dropout(self, x_TF: torch.Tensor, view: View, purpose: int) -> torch.Tensor:
        return dropout(
            x_TF,
            p=self.config.dropout,
            seed=view.seed(self.index, purpose),
            token_ids_T=view.token_ids_T,
        )


def _linear(layer: nn.Linear, x_TF: torch.Tensor, view: View) -> torch.Tensor:
    return linear(x_TF, layer.weight, layer.bias, dtype=view.product_dtype)
