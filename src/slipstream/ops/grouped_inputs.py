"""What the softmax of token groups is asked: one thing to hand from the caller to whichever
back-end serves.
"""

from dataclasses import dataclass, replace

import torch

from slipstream.ops import operand_checks
from slipstream.ops.token_groups import Groups


@dataclass(frozen=True)
class GroupedSoftmaxInputs:
    """The operands of `grouped_softmax_loss`; gradients reach hidden_TD, targets_TD and rows_UD."""

    hidden_TD: torch.Tensor
    targets_TD: torch.Tensor  # the row of each token's target
    same_T: torch.Tensor  # index into rows_UD of the token's target, -1 where it is not among them
    rows_UD: torch.Tensor
    negatives_XR: torch.Tensor  # indices into rows_UD
    groups: Groups
    temperature: float = 1.0
    target_log_q_T: torch.Tensor | None = None
    negative_log_q_XR: torch.Tensor | None = None

    def check(self) -> None:
        """One clear exception for operands that do not fit."""
        operand_checks.floating("hidden", self.hidden_TD, dims=2)
        tokens, width = self.hidden_TD.shape
        device = self.hidden_TD.device
        operand_checks.like("targets", self.targets_TD, "hidden", self.hidden_TD, (tokens, width))
        operand_checks.like(
            "rows", self.rows_UD, "hidden", self.hidden_TD, (self.rows_UD.shape[0], width)
        )
        operand_checks.integers("same", self.same_T, shape=(tokens,), device=device)
        operand_checks.index(
            "negatives", self.negatives_XR, self.rows_UD.shape[0], shape=(None, None), device=device
        )
        operand_checks.positive("temperature", self.temperature)
        if self.target_log_q_T is not None:
            operand_checks.like(
                "target_log_q", self.target_log_q_T, "hidden", self.hidden_TD, (tokens,)
            )
        if self.negative_log_q_XR is not None:
            shape = tuple(self.negatives_XR.shape)
            operand_checks.like(
                "negative_log_q", self.negative_log_q_XR, "hidden", self.hidden_TD, shape
            )
        self.groups.check(tokens, self.negatives_XR.shape[0])

    def with_fixed_chances(self) -> "GroupedSoftmaxInputs":
        """The same question; no gradient reaches the chances with which items are drawn."""
        target, negative = (
            None if log_q is None else log_q.detach()
            for log_q in (self.target_log_q_T, self.negative_log_q_XR)
        )
        return replace(self, target_log_q_T=target, negative_log_q_XR=negative)
