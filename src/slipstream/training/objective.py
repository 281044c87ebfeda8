"""Losses as sums over supervised tokens; the one global normaliser is the count of those tokens in
the whole step.

Nothing here divides, so cutting a batch into micro-batches or ranks never changes the objective.
What could still mix samples is where negatives come from and who shares them:
`negative_plan.mixed_by` says so, and a schedule which cuts batches refuses it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint

from slipstream.ops.grouped_losses import GroupedSoftmaxInputs, TokenGroups, grouped_softmax_loss
from slipstream.ops.grouped_types import one_token_groups
from slipstream.ops.losses import full_softmax_loss, sampled_softmax_loss, shared_softmax_loss
from slipstream.ops.losses_reference import sliced, target_loss
from slipstream.ops.rows import take_rows
from slipstream.tables.transport import half_rounded

_KEPT_COLUMNS = 8  # negatives per token whose rows bce gathers at a time


@dataclass(frozen=True)
class RetrievalLossInputs:
    """What a retrieval loss is asked: which of these rows followed each hidden state. Indices point
    into `rows_UD`.
    """

    hidden_SD: torch.Tensor
    rows_UD: torch.Tensor
    targets_S: torch.Tensor
    negatives: (
        torch.Tensor | None
    )  # [S, R], [X, R] per sequence, [R] when shared, or None when every row competes
    temperature: float
    target_log_q_S: torch.Tensor | None = None
    negative_log_q: torch.Tensor | None = None  # shaped like the negatives
    groups: TokenGroups | None = (
        None  # tokens that score each other's negatives, or one set together
    )
    negative_rows_UD: torch.Tensor | None = (
        None  # what negatives are read from where that is not `rows_UD` itself
    )
    literal: bool = (
        False  # groups take over each other's logits instead of scoring each other's negatives
    )


def sampled_softmax(question: RetrievalLossInputs) -> torch.Tensor:
    assert question.negatives is not None
    if question.literal and question.groups is not None:
        return literal_shared_softmax(question)
    if question.groups is not None or question.negative_rows_UD is not None:
        return grouped_softmax(question)
    return sampled_softmax_loss(
        question.hidden_SD,
        question.rows_UD,
        question.targets_S,
        question.negatives,
        temperature=question.temperature,
        target_log_q_T=question.target_log_q_S,
        negative_log_q_TR=question.negative_log_q,
    )


def grouped_softmax(question: RetrievalLossInputs) -> torch.Tensor:
    """The tokens of a group against all sets of the group."""
    assert question.negatives is not None
    return grouped_softmax_loss(
        GroupedSoftmaxInputs(
            question.hidden_SD,
            take_rows(question.rows_UD, question.targets_S),
            question.targets_S,
            question.rows_UD if question.negative_rows_UD is None else question.negative_rows_UD,
            question.negatives,
            one_token_groups(len(question.hidden_SD), question.hidden_SD.device)
            if question.groups is None
            else question.groups,
            question.temperature,
            question.target_log_q_S,
            question.negative_log_q,
        )
    )


def literal_shared_softmax(question: RetrievalLossInputs) -> torch.Tensor:
    """The ablation: beside its own logits a token's denominator holds those its group's other
    tokens have with *their* negatives.

    No further product is computed, but these are scores of other queries: the sum is not the
    softmax of any token.
    """
    assert question.negatives is not None and question.groups is not None
    rows_UD, temperature, negatives_SR = question.rows_UD, question.temperature, question.negatives

    def own_logits(
        h_SD: torch.Tensor, index_SR: torch.Tensor, log_q_SR: torch.Tensor | None
    ) -> torch.Tensor:
        logits_SR = torch.einsum("sd,srd->sr", h_SD, rows_UD[index_SR]) / temperature
        return logits_SR if log_q_SR is None else logits_SR - log_q_SR

    tokens, values = len(negatives_SR), negatives_SR.shape[1] * question.hidden_SD.shape[1]
    logits_SR = sliced(
        own_logits, tokens, values, question.hidden_SD, negatives_SR, question.negative_log_q
    )
    target_S1 = (question.hidden_SD * take_rows(rows_UD, question.targets_S)).sum(
        1, keepdim=True
    ) / temperature
    target_S1 = (
        target_S1
        if question.target_log_q_S is None
        else target_S1 - question.target_log_q_S.unsqueeze(1)
    )
    groups = question.groups
    begin_S, end_S = (groups.offsets_G1[groups.of_tokens() + side].unsqueeze(1) for side in (0, 1))
    member_SK = begin_S + torch.arange(groups.largest, device=begin_S.device)
    absent_SK1, member_SK = (member_SK >= end_S).unsqueeze(2), member_SK.clamp(max=tokens - 1)
    left_out_SKR = absent_SK1 | (negatives_SR[member_SK] == question.targets_S[:, None, None])
    return target_loss(target_S1, logits_SR[member_SK].flatten(1), left_out_SKR.flatten(1))


def shared_softmax(question: RetrievalLossInputs) -> torch.Tensor:
    assert question.negatives is not None
    return shared_softmax_loss(
        question.hidden_SD,
        question.rows_UD,
        question.targets_S,
        question.negatives,
        temperature=question.temperature,
        target_log_q_T=question.target_log_q_S,
        negative_log_q_R=question.negative_log_q,
    )


def full_softmax(question: RetrievalLossInputs) -> torch.Tensor:
    return full_softmax_loss(
        question.hidden_SD, question.rows_UD, question.targets_S, temperature=question.temperature
    )


def binary_cross_entropy(question: RetrievalLossInputs) -> torch.Tensor:
    """-log sigmoid(target) - sum over negatives of log(1 - sigmoid(negative)); negatives equal to
    the target are left out.
    """
    assert question.negatives is not None
    hidden_SD, rows_UD, temperature = question.hidden_SD, question.rows_UD, question.temperature

    def score(index_S: torch.Tensor) -> torch.Tensor:
        return (hidden_SD * take_rows(rows_UD, index_S)).sum(-1) / temperature

    def push_down(index_SC: torch.Tensor) -> torch.Tensor:
        logits_SC = torch.stack([score(index_S) for index_S in index_SC.unbind(1)], dim=1)
        return (
            F.softplus(logits_SC)
            .masked_fill(index_SC == question.targets_S.unsqueeze(1), 0.0)
            .sum(1)
        )

    loss_S = F.softplus(-score(question.targets_S))
    for index_SC in question.negatives.split(_KEPT_COLUMNS, dim=1):
        # Recomputed in the backward pass, so that the gathered rows of one group at most are alive.
        loss_S = loss_S + checkpoint(
            push_down, index_SC, use_reentrant=False, preserve_rng_state=False
        )
    return loss_S


class _HalfPrecision(torch.autograd.Function):
    """Rounded forward, the gradient as it is."""

    @staticmethod
    def forward(ctx: FunctionCtx, rows_UD: torch.Tensor) -> torch.Tensor:
        return half_rounded(rows_UD)

    @staticmethod
    def backward(ctx: FunctionCtx, grad_UD: torch.Tensor) -> torch.Tensor:
        return grad_UD


def half_precision(rows_UD: torch.Tensor) -> torch.Tensor:
    """Rows as 16 bits hold them, whether they travelled so or not: the objective does not depend on
    the company in a batch.
    """
    return _HalfPrecision.apply(rows_UD)


@dataclass(frozen=True)
class RetrievalLoss:
    """One kind of retrieval loss, and who has a set of negatives of their own."""

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
