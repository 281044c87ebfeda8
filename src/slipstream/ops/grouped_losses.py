"""Softmax of token groups: all tokens of a group compete with the same negatives, read once for all of them.

Two things a recipe can ask for are groups: *sharing*, where k tokens score each other's sets beside their own, and *one set per
sequence*. Tokens come group after group, and so do the sets: group g owns tokens offsets_G1[g] … offsets_G1[g + 1] and the sets
set_offsets_G1[g] … set_offsets_G1[g + 1] of `negatives_XR` (X sets of R). Targets and negatives may lie in different matrices:
rows at another precision, or a segment of them; `same_T` says which negative is the token's own target.
"""

from dataclasses import dataclass
from types import ModuleType

import torch

from slipstream.ops import backend as backends
from slipstream.ops import grouped_losses_native, grouped_losses_reference, operand_checks
from slipstream.ops.token_groups import Groups

__all__ = ["GroupedQuestion", "Groups", "grouped_softmax_loss", "pieces"]


@dataclass(frozen=True)
class GroupedQuestion:
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
        operand_checks.like("rows", self.rows_UD, "hidden", self.hidden_TD, (self.rows_UD.shape[0], width))
        operand_checks.integers("same", self.same_T, shape=(tokens,), device=device)
        operand_checks.index("negatives", self.negatives_XR, self.rows_UD.shape[0], shape=(None, None), device=device)
        operand_checks.positive("temperature", self.temperature)
        if self.target_log_q_T is not None:
            operand_checks.like("target_log_q", self.target_log_q_T, "hidden", self.hidden_TD, (tokens,))
        if self.negative_log_q_XR is not None:
            shape = tuple(self.negatives_XR.shape)
            operand_checks.like("negative_log_q", self.negative_log_q_XR, "hidden", self.hidden_TD, shape)
        self.groups.check(tokens, self.negatives_XR.shape[0])


def pieces(example: torch.Tensor, *, backend: str | None = None) -> ModuleType:
    """The back-end's `score`, `deal`, `add_dealt` and `block_of`, for callers that add the rows' gradient up themselves."""
    return grouped_losses_native if backends.choose(backend, example) == "native" else grouped_losses_reference


def grouped_softmax_loss(question: GroupedQuestion, *, backend: str | None = None) -> torch.Tensor:
    """-log softmax of each token's target among itself and its group's negatives; those that are its target are left out."""
    question.check()
    return pieces(question.hidden_TD, backend=backend).grouped_softmax_loss(
        question.hidden_TD,
        question.targets_TD,
        question.same_T,
        question.rows_UD,
        question.negatives_XR,
        question.groups,
        question.temperature,
        None if question.target_log_q_T is None else question.target_log_q_T.detach(),
        None if question.negative_log_q_XR is None else question.negative_log_q_XR.detach(),
    )
