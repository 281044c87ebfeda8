"""A layer's relative bias. Touch this when a bias depends on more than position and time.

Position is a table by distance. Time is a table by logarithmic bucket or, with
`time_encoding: functional`, FuXi-gamma's exponential-power function a exp(-b u^c) of the gap u in
days (docs/decisions.md says how a, b and c are held, and why).
"""

import math

import torch
from torch import nn

from slipstream.models.backbone import View
from slipstream.models.model_config import ModelConfig
from slipstream.ops.attention import RelativeBias

_STD = 0.02
_DECAY_START = (_STD, 0.0, -math.log(3))  # b = 1, c = 1/4: from seconds to years, no gap is lost


class RelativeTables(nn.Module):
    """One bias per position distance and one per time bucket or gap, shared by all heads."""

    def __init__(self, config: ModelConfig, capacity: int) -> None:
        super().__init__()
        self.position_P: nn.Parameter | None = None
        self.time_W: nn.Parameter | None = None
        self.decay_3: nn.Parameter | None = None  # a, ln b, logit c
        if config.position_bias:
            self.position_P = nn.Parameter(torch.empty(2 * capacity - 1).normal_(std=_STD))
        if config.time_bias == "none":
            return
        if config.time_encoding == "functional":
            self.decay_3 = nn.Parameter(torch.tensor(_DECAY_START))
        else:
            self.time_W = nn.Parameter(torch.empty(config.time_buckets + 1).normal_(std=_STD))

    def bias(self) -> RelativeBias | None:
        """The biases as attention takes them; None where the recipe has neither."""
        bias = RelativeBias(self.position_P, self.time_W, self._decay_3())
        return bias if self.position_P is not None or bias.timed else None

    def _decay_3(self) -> torch.Tensor | None:
        """a, b > 0 and 0 < c < 1 of the function of the gap."""
        if self.decay_3 is None:
            return None
        a_1, log_rate_1, power_logit_1 = self.decay_3.split(1)
        return torch.cat([a_1, log_rate_1.exp(), power_logit_1.sigmoid()])

    def times(self, view: View) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """When the queries look back and when the keys happened; None without a time bias."""
        if self.time_W is None and self.decay_3 is None:
            return None, None
        return view.query_timestamps_T, view.key_timestamps_S
