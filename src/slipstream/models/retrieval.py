"""Retrieval: at every behaviour, a vector that should lie close to the next item's row.

Touch this when the retrieval model reads other tokens.
"""

from collections.abc import Mapping, Sequence

import torch

from slipstream.models.backbone import KV
from slipstream.models.head import SequenceModel
from slipstream.models.inputs import ModelInput
from slipstream.models.model_config import ModelConfig


class RetrievalModel(SequenceModel):
    """One token per behaviour: the item's row and its side features, summed."""

    def __init__(
        self,
        config: ModelConfig,
        user_features: Sequence[str] = (),
        item_features: Sequence[str] = (),
        joined: Sequence[str] = (),
        widths: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(config, 1, user_features, item_features, 0, joined, widths)

    def forward(self, given: ModelInput, past: list[KV] | None = None) -> torch.Tensor:
        """hidden_TD, one row per behaviour; the loss and serving normalise it where asked to."""
        return self.hidden_TD(given, past)
