"""A layer's relative bias tables. Touch this when a bias depends on more than position and time."""

import torch
from torch import nn

from slipstream.models.backbone import View
from slipstream.models.model_config import ModelConfig
from slipstream.ops.attention import RelativeBias

_STD = 0.02


class RelativeTables(nn.Module):
    """One bias per position distance and one per logarithmic time bucket, shared by all heads."""

    def __init__(self, config: ModelConfig, capacity: int) -> None:
        super().__init__()
        self.position_P: nn.Parameter | None = None
        self.time_W: nn.Parameter | None = None
        if config.position_bias:
            self.position_P = nn.Parameter(torch.empty(2 * capacity - 1).normal_(std=_STD))
        if config.time_bias != "none":
            self.time_W = nn.Parameter(torch.empty(config.time_buckets + 1).normal_(std=_STD))

    def bias(self) -> RelativeBias | None:
        """The tables as attention takes them; None where the recipe has neither."""
        if self.position_P is None and self.time_W is None:
            return None
        return RelativeBias(position_P=self.position_P, time_W=self.time_W)

    def times(self, view: View) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """When the queries look back and when the keys happened; None without a time table."""
        return (
            (view.query_timestamps_T, view.key_timestamps_S)
            if self.time_W is not None
            else (None, None)
        )
