"""What the retrieval and the ranking model share: tokens from rows, and the backbone.

Touch this when both kinds of model read something new from a batch.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from slipstream.models.backbone import KV, Backbone
from slipstream.models.fuxi import FuXiLayer
from slipstream.models.gated_attention import EPS
from slipstream.models.hstu import HSTULayer
from slipstream.models.inputs import ModelInput
from slipstream.models.model_config import ModelConfig
from slipstream.models.projection import InputProjections
from slipstream.models.sasrec import SASRecLayer
from slipstream.models.stream import Stream, lay_out, token_rows


def build_backbone(config: ModelConfig, *, tokens: int, capacity: int) -> Backbone:
    """The layers for streams of up to `capacity` tokens; `tokens` is the default SiLU divisor."""
    divisor = float(tokens) if config.divisor is None else config.divisor
    if config.kind == "sasrec":
        return Backbone(
            config,
            capacity,
            [SASRecLayer(config, i) for i in range(config.blocks)],
            nn.LayerNorm(config.dim, eps=EPS),
        )
    layer = HSTULayer if config.kind == "hstu" else FuXiLayer
    return Backbone(
        config, capacity, [layer(config, i, capacity, divisor) for i in range(config.blocks)]
    )


class SequenceModel(nn.Module):
    """A backbone with the tokens it reads: one per behaviour, or two with interleaved actions."""

    def __init__(
        self,
        config: ModelConfig,
        tokens_per_behaviour: int,
        user_features: Sequence[str],
        item_features: Sequence[str],
        spare: int,
        joined: Sequence[str] = (),
        widths: Mapping[str, int] | None = None,
    ) -> None:
        """`joined` are further inputs of a behaviour's token; `widths` those of another width."""
        super().__init__()
        self.config = config
        self.tokens_per_behaviour = tokens_per_behaviour
        self.user_names = [f"user.{name}" for name in user_features]
        self.item_names = ["item", *(f"item.{name}" for name in item_features), *joined]
        self.factor = config.dim**0.5 if config.scale_embeddings else 1.0
        tokens = tokens_per_behaviour * config.max_len
        self.backbone = build_backbone(
            config, tokens=tokens, capacity=tokens + len(self.user_names) + spare
        )
        self.projections = InputProjections(widths or {}, config.dim)

    @property
    def held_back_behaviours(self) -> int:
        """How many last behaviours of a prefix cannot be cached: they use the next one's time."""
        return 1 if self.config.time_bias == "next" else 0

    def stream(self, given: ModelInput, past: list[KV] | None) -> Stream:
        """The token stream of a batch; with a past, the user tokens are already part of it."""
        rows = self.projections(given.rows)
        behaviours_TD = token_rows(rows, self.item_names, self.factor)
        users = (
            []
            if past is not None
            else [token_rows(rows, [name], self.factor) for name in self.user_names]
        )
        return lay_out(given, behaviours_TD, self.config.time_bias, users, self.actions_TD(given))

    def actions_TD(self, given: ModelInput) -> torch.Tensor | None:
        """Action tokens, one per behaviour; None where the head reads no actions."""
        return None

    def hidden_TD(self, given: ModelInput, past: list[KV] | None = None) -> torch.Tensor:
        """The backbone's output at every behaviour's own token."""
        stream = self.stream(given, past)
        hidden_SD, _ = self.backbone(stream.x_SD, stream.layout, past)
        return stream.behaviours(hidden_SD)
