"""HSTU's layer: pointwise SiLU attention with relative bias, gated by u.

    [u, v, q, k] = SiLU(LN(x) W)
    A = SiLU(scale q·k + position bias + time bias) / divisor, causal
    y = x + W_o dropout(u * LN(A v)) + b_o

Norms have no weights. The divisor is a constant of the model, never a batch's length: see
docs/architecture.md. Touch this when HSTU's layer changes; what it shares with FuXi is in
gated_attention.py.
"""

import torch

from slipstream.models.backbone import KV, View
from slipstream.models.gated_attention import EPS, GatedAttention
from slipstream.ops.attention import hstu_attention
from slipstream.ops.layer_pass import LayerTensors
from slipstream.ops.pointwise import layer_norm, norm_gate_dropout


class HSTULayer(GatedAttention):
    """One HSTU block."""

    operator, gates = staticmethod(hstu_attention), 1

    def norm(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Layer norm without weights."""
        return layer_norm(x_TD, eps=EPS)

    def forward(
        self, x_TD: torch.Tensor, view: View, past: KV | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        u_TF, attended_TF, k_SHK, v_SHV = self.attend(x_TD, view, past)
        gated_TF = norm_gate_dropout(
            attended_TF,
            u_TF,
            norm="layer",
            eps=EPS,
            p=self.config.dropout,
            seed=view.seed(self.index),
            token_ids_T=view.token_ids_T,
        )
        return self.project_out(gated_TF, view) + x_TD, (k_SHK, v_SHV)

    def tensors(self) -> LayerTensors:
        """The weights, as the compiled pass takes them."""
        return LayerTensors(
            self.uvqk_FD, self.output.weight, self.output.bias, bias=self.relative.bias()
        )
