"""Losses as sums over supervised tokens; the one normaliser is the count of the whole step.

Nothing here divides, so cutting a batch into micro-batches or ranks never changes the objective.
Only the source and the sharing of negatives can make samples depend on each other:
`negative_plan.mixed_by` names it, and a schedule that cuts batches refuses it. Touch this to add a
loss.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint

from slipstream.ops.grouped_losses import GroupedSoftmaxInputs, grouped_softmax_loss
from slipstream.ops.grouped_types import TokenGroups, one_token_groups
from slipstream.ops.losses import full_softmax_loss, sampled_softmax_loss, shared_softmax_loss
from slipstream.ops.losses_reference import sliced, subtract, target_loss
from slipstream.ops.rows import take_rows
from slipstream.tables.transport import half_rounded

_KEPT_COLUMNS = 8  # negatives per token whose rows bce gathers at a time


@dataclass(frozen=True)
class RetrievalLossInputs:
    """Hidden states, and the rows among which each finds its target by indices into `rows_UD`."""

    hidden_SD: torch.Tensor
    rows_UD: torch.Tensor
    targets_S: torch.Tensor
    # [S, R], [X, R] per sequence, [R] when shared, or None when every row competes.
    negatives: torch.Tensor | None
    temperature: float
    target_log_q_S: torch.Tensor | None = None
    negative_log_q: torch.Tensor | None = None  # shaped like the negatives
    groups: TokenGroups | None = None  # tokens that score each other's negatives, or one set
    negative_rows_UD: torch.Tensor | None = None  # where negatives are not read from `rows_UD`
    literal: bool = False  # groups use each other's logits instead of scoring their negatives

    @property
    def operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The tensors that a loss over drawn negatives compares."""
        assert self.negatives is not None
        return self.hidden_SD, self.rows_UD, self.targets_S, self.negatives

    def logits(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits of the targets [S] and of their negatives [S, R], for own losses.

        A negative that is the target itself is minus infinity. Without drawn negatives the whole
        catalogue competes.
        """
        target_S1, rows_UD = target_logits(self), self.rows_UD
        if self.negatives is not None and self.negatives.dim() == 2:
            index_SR, logits_SR = self.negatives, negative_logits(self)
        else:
            if self.negative_rows_UD is not None:
                rows_UD = self.negative_rows_UD
            index_R = torch.arange(len(rows_UD), device=rows_UD.device)
            index_R = index_R if self.negatives is None else self.negatives
            logits_SR = subtract(
                self.hidden_SD @ rows_UD[index_R].T / self.temperature, self.negative_log_q
            )
            index_SR = index_R.unsqueeze(0)
        is_target_SR = index_SR == self.targets_S.unsqueeze(1)
        return target_S1.squeeze(1), logits_SR.masked_fill(is_target_SR, -torch.inf)


def target_logits(inputs: RetrievalLossInputs) -> torch.Tensor:
    """Return every token's logit of its target [S, 1]."""
    targets_SD = take_rows(inputs.rows_UD, inputs.targets_S)
    logits_S1 = (inputs.hidden_SD * targets_SD).sum(1, keepdim=True) / inputs.temperature
    log_q_S = inputs.target_log_q_S
    return subtract(logits_S1, None if log_q_S is None else log_q_S.unsqueeze(1))


def negative_logits(inputs: RetrievalLossInputs) -> torch.Tensor:
    """Return every token's logits of its own negatives [S, R]."""
    assert inputs.negatives is not None
    rows_UD = inputs.rows_UD if inputs.negative_rows_UD is None else inputs.negative_rows_UD
    negatives_SR, temperature = inputs.negatives, inputs.temperature

    def own_logits(
        h_SD: torch.Tensor, index_SR: torch.Tensor, log_q_SR: torch.Tensor | None
    ) -> torch.Tensor:
        logits_SR = torch.einsum("sd,srd->sr", h_SD, rows_UD[index_SR]) / temperature
        return subtract(logits_SR, log_q_SR)

    tokens, values = len(negatives_SR), negatives_SR.shape[1] * inputs.hidden_SD.shape[1]
    return sliced(own_logits, tokens, values, inputs.hidden_SD, negatives_SR, inputs.negative_log_q)


def sampled_softmax(inputs: RetrievalLossInputs) -> torch.Tensor:
    if inputs.literal and inputs.groups is not None:
        return literal_shared_softmax(inputs)
    if inputs.groups is not None or inputs.negative_rows_UD is not None:
        return grouped_softmax(inputs)
    return sampled_softmax_loss(
        *inputs.operands,
        temperature=inputs.temperature,
        target_log_q_T=inputs.target_log_q_S,
        negative_log_q_TR=inputs.negative_log_q,
    )


def grouped_softmax(inputs: RetrievalLossInputs) -> torch.Tensor:
    """Compare the tokens of a group with all sets of the group."""
    assert inputs.negatives is not None
    return grouped_softmax_loss(
        GroupedSoftmaxInputs(
            inputs.hidden_SD,
            take_rows(inputs.rows_UD, inputs.targets_S),
            inputs.targets_S,
            inputs.rows_UD if inputs.negative_rows_UD is None else inputs.negative_rows_UD,
            inputs.negatives,
            one_token_groups(len(inputs.hidden_SD), inputs.hidden_SD.device)
            if inputs.groups is None
            else inputs.groups,
            inputs.temperature,
            inputs.target_log_q_S,
            inputs.negative_log_q,
        )
    )


def literal_shared_softmax(inputs: RetrievalLossInputs) -> torch.Tensor:
    """Ablation: a token's denominator also holds the group's logits with *their own* negatives.

    No further product is computed, but these are scores of other queries: the sum is not the
    softmax of any token.
    """
    assert inputs.negatives is not None and inputs.groups is not None
    negatives_SR, tokens = inputs.negatives, len(inputs.negatives)
    logits_SR, target_S1 = negative_logits(inputs), target_logits(inputs)
    groups = inputs.groups
    begin_S, end_S = (groups.offsets_G1[groups.of_tokens() + side].unsqueeze(1) for side in (0, 1))
    member_SK = begin_S + torch.arange(groups.largest, device=begin_S.device)
    absent_SK1, member_SK = (member_SK >= end_S).unsqueeze(2), member_SK.clamp(max=tokens - 1)
    left_out_SKR = absent_SK1 | (negatives_SR[member_SK] == inputs.targets_S[:, None, None])
    return target_loss(target_S1, logits_SR[member_SK].flatten(1), left_out_SKR.flatten(1))


def shared_softmax(inputs: RetrievalLossInputs) -> torch.Tensor:
    return shared_softmax_loss(
        *inputs.operands,
        temperature=inputs.temperature,
        target_log_q_T=inputs.target_log_q_S,
        negative_log_q_R=inputs.negative_log_q,
    )


def full_softmax(inputs: RetrievalLossInputs) -> torch.Tensor:
    return full_softmax_loss(
        inputs.hidden_SD, inputs.rows_UD, inputs.targets_S, temperature=inputs.temperature
    )


def binary_cross_entropy(inputs: RetrievalLossInputs) -> torch.Tensor:
    """Return -log sigmoid(target) - the sum over negatives of log(1 - sigmoid(negative)).

    Negatives equal to the target are left out.
    """
    assert inputs.negatives is not None
    hidden_SD, rows_UD, temperature = inputs.hidden_SD, inputs.rows_UD, inputs.temperature

    def score(index_S: torch.Tensor) -> torch.Tensor:
        return (hidden_SD * take_rows(rows_UD, index_S)).sum(-1) / temperature

    def push_down(index_SC: torch.Tensor) -> torch.Tensor:
        logits_SC = torch.stack([score(index_S) for index_S in index_SC.unbind(1)], dim=1)
        return (
            F.softplus(logits_SC).masked_fill(index_SC == inputs.targets_S.unsqueeze(1), 0.0).sum(1)
        )

    loss_S = F.softplus(-score(inputs.targets_S))
    for index_SC in inputs.negatives.split(_KEPT_COLUMNS, dim=1):
        # Recomputed in the backward pass, so that the gathered rows of one group at most are alive.
        loss_S = loss_S + checkpoint(
            push_down, index_SC, use_reentrant=False, preserve_rng_state=False
        )
    return loss_S


class _HalfPrecision(torch.autograd.Function):
    """Rounds in the forward pass; the gradient is unchanged."""

    @staticmethod
    def forward(ctx: FunctionCtx, rows_UD: torch.Tensor) -> torch.Tensor:
        return half_rounded(rows_UD)

    @staticmethod
    def backward(ctx: FunctionCtx, grad_UD: torch.Tensor) -> torch.Tensor:
        return grad_UD


def half_precision(rows_UD: torch.Tensor) -> torch.Tensor:
    """Round rows to 16 bits, whether they were sent so or not.

    The objective then does not depend on the other samples of a batch.
    """
    return _HalfPrecision.apply(rows_UD)


@dataclass(frozen=True)
class RetrievalLoss:
    """One kind of retrieval loss, and what has a set of negatives of its own."""

    per_token: Callable[[RetrievalLossInputs], torch.Tensor]
    negatives: Literal["per_token", "per_sequence", "shared", "catalogue"]


RETRIEVAL_LOSSES = {
    "sampled_softmax": RetrievalLoss(sampled_softmax, "per_token"),
    "sequence_softmax": RetrievalLoss(grouped_softmax, "per_sequence"),
    "shared_softmax": RetrievalLoss(shared_softmax, "shared"),
    "full_softmax": RetrievalLoss(full_softmax, "catalogue"),
    "bce": RetrievalLoss(binary_cross_entropy, "per_token"),
}


def ranking_loss(
    logits_SA: torch.Tensor, labels_SA: torch.Tensor, weights_A: torch.Tensor
) -> torch.Tensor:
    """Weighted binary cross-entropy summed over the actions: one value per supervised token."""
    return (
        F.binary_cross_entropy_with_logits(logits_SA, labels_SA, reduction="none") * weights_A
    ).sum(1)
