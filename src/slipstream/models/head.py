"""What the retrieval and the ranking model share: tokens from rows, the backbone, and the prefix
that serving reuses.
"""

from collections.abc import Sequence

import torch
from torch import nn

from slipstream.models.backbone import KV, Backbone
from slipstream.models.fuxi import FuXiLayer
from slipstream.models.gated_attention import EPS
from slipstream.models.hstu import HSTULayer
from slipstream.models.inputs import ModelInput
from slipstream.models.model_config import ModelConfig
from slipstream.models.sasrec import SASRecLayer
from slipstream.models.stream import Stream, lay_out, token_rows


def build_backbone(config: ModelConfig, *, tokens: int, capacity: int) -> Backbone:
    """The stack of layers for streams of up to `capacity` tokens; `tokens` is the SiLU divisor
    where the config names none.
    """
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
    """A backbone with the tokens it reads. `tokens_per_behaviour` is 1, or 2 where actions are
    interleaved.
    """

    def __init__(
        self,
        config: ModelConfig,
        tokens_per_behaviour: int,
        user_features: Sequence[str],
        item_features: Sequence[str],
        spare: int,
    ) -> None:
        super().__init__()
        self.config = config
        self.tokens_per_behaviour = tokens_per_behaviour
        self.user_names = [f"user.{name}" for name in user_features]
        self.item_names = ["item", *(f"item.{name}" for name in item_features)]
        self.factor = config.dim**0.5 if config.scale_embeddings else 1.0
        tokens = tokens_per_behaviour * config.max_len
        self.backbone = build_backbone(
            config, tokens=tokens, capacity=tokens + len(self.user_names) + spare
        )

    @property
    def held_back_behaviours(self) -> int:
        """How many of a prefix's last behaviours cannot be cached, because they look back from the
        time of what follows.
        """
        return 1 if self.config.time_bias == "next" else 0

    def prefill(self, given: ModelInput, past: list[KV] | None = None) -> list[KV]:
        """Keys and values of a history, for a later call's `past`: exact whatever follows.

        The last `held_back_behaviours` of every sequence are left out; hand them in again with what
        follows them.
        """
        if given.num_candidates_B is not None and bool(given.num_candidates_B.any()):
            raise ValueError(
                "a prefix holds history only; score candidates in the call that uses it"
            )
        stream = self.stream(given, past)
        _, kept = self.backbone(stream.x_SD, stream.layout, past, keep_kv=True)
        if self.held_back_behaviours == 0:
            return kept
        held_B = self.tokens_per_behaviour * (given.offsets_B1.diff() > 0).long()
        return [kv.first(kv.offsets_B1.diff() - held_B) for kv in kept]

    def stream(self, given: ModelInput, past: list[KV] | None) -> Stream:
        """The token stream of a batch. User tokens belong to the prefix: with a past they are there
        already.
        """
        behaviours_TD = token_rows(given.rows, self.item_names, self.factor)
        users = (
            []
            if past is not None
            else [token_rows(given.rows, [name], self.factor) for name in self.user_names]
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
