"""What HSTU's and FuXi's layers share: the projection and attention with relative bias.

    [u, v, q, k] = SiLU(norm(x) W)

Keys and values of a cached prefix come before those of the new tokens. Touch this when both layers
change.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import nn

from slipstream.models.backbone import KV, Layer, View, joined_heads
from slipstream.models.model_config import ModelConfig
from slipstream.models.precision import linear, linear_silu, linear_silu_parts
from slipstream.models.relative import RelativeTables
from slipstream.ops.layer_pass import LayerSizes

EPS = 1e-6
WEIGHT_STD = 0.02


class GatedAttention(Layer):
    """A layer whose gate `u` is `gates` values wide and whose attention is `operator`."""

    operator: ClassVar[Callable[..., torch.Tensor]]
    gates: ClassVar[int]

    def __init__(self, config: ModelConfig, index: int, capacity: int, divisor: float) -> None:
        super().__init__()
        self.config, self.index, self.divisor = config, index, divisor
        value_width, key_width = config.heads * config.dv, config.heads * config.dqk
        self.widths = [self.gates * value_width, value_width, key_width, key_width]
        self.uvqk_FD = nn.Parameter(
            torch.empty(sum(self.widths), config.dim).normal_(std=WEIGHT_STD)
        )
        self.output = nn.Linear(self.gates * value_width, config.dim)
        nn.init.xavier_uniform_(self.output.weight)
        nn.init.zeros_(self.output.bias)
        self.relative = RelativeTables(config, capacity)

    @abstractmethod
    def norm(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Normalise the tokens before the projection."""

    def attend(
        self, x_TD: torch.Tensor, view: View, past: KV | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The gate, attention's output (heads and channels side by side), and keys and values."""
        normed_TD = self.norm(x_TD)
        u_TF, v_TF, q_TF, k_TF = linear_silu_parts(
            normed_TD, self.uvqk_FD, self.widths, dtype=view.product_dtype
        )
        k_SHK, v_SHV = joined_heads(k_TF, v_TF, self.config.heads, view, past)
        timestamps_T, k_timestamps_S = self.relative.times(view)
        attended = type(self).operator(
            q_TF.unflatten(1, (self.config.heads, -1)),
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
        return u_TF, attended.flatten(1), k_SHK, v_SHV

    def project_out(self, x_TF: torch.Tensor, view: View) -> torch.Tensor:
        """The output projection."""
        return linear(x_TF, self.output.weight, self.output.bias, dtype=view.product_dtype)

    def keys_values(
        self, x_TD: torch.Tensor, view: View, past: KV | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Only the keys and values of `attend`, by the same products."""
        _, v_FD, _, k_FD = self.uvqk_FD.split(self.widths)
        normed_TD = self.norm(x_TD)
        return joined_heads(
            linear_silu(normed_TD, k_FD, dtype=view.product_dtype),
            linear_silu(normed_TD, v_FD, dtype=view.product_dtype),
            self.config.heads,
            view,
            past,
        )

    def sizes(self) -> LayerSizes:
        """The sizes and constants of the layer."""
        config = self.config
        return LayerSizes(
            "fuxi" if self.gates == 3 else "hstu",
            config.dim,
            config.heads,
            config.dqk,
            config.dv,
            divisor=self.divisor,
            scale=config.scale or 1.0,
            eps=EPS,
        )
