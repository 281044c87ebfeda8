"""What every back-end of the sampled and the shared softmax receives.

Touch this when these losses get another operand.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SoftmaxInputs:
    """Checked operands; gradients reach hidden_TD and rows_UD, indices point into rows_UD."""

    hidden_TD: torch.Tensor
    rows_UD: torch.Tensor
    targets_T: torch.Tensor
    negatives: torch.Tensor  # [T, R]: each token's own; [R]: one set for all tokens
    temperature: float
    target_log_q_T: torch.Tensor | None
    negative_log_q: torch.Tensor | None  # like negatives
