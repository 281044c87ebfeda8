"""Losses as sums over supervised tokens; the one global normaliser is the count of those tokens in the whole step.

Nothing here divides, so cutting a batch into micro-batches or ranks never changes the objective. A loss that would mix samples
(in-batch negatives) has to say `mixes_samples`, so that a schedule which cuts batches can refuse it; none of these does: negatives
come from the catalogue by name, never from the neighbours in the batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from slipstream.ops.losses import full_softmax_loss, sampled_softmax_loss, shared_softmax_loss
from slipstream.ops.rows import take_rows

_KEPT_COLUMNS = 8  # negatives per token whose rows bce gathers at a time


@dataclass(frozen=True)
class Question:
    """What a retrieval loss is asked: which of these rows followed each hidden state. Indices point into `rows_UD`."""

    hidden_SD: torch.Tensor
    rows_UD: torch.Tensor
    targets_S: torch.Tensor
    negatives: torch.Tensor | None  # [S, R], or [R] when shared, or None when every row competes
    temperature: float
    target_log_q_S: torch.Tensor | None = None
    negative_log_q: torch.Tensor | None = None  # shaped like the negatives


def sampled_softmax(question: Question) -> torch.Tensor:
    assert question.negatives is not None
    return sampled_softmax_loss(
        question.hidden_SD,
        question.rows_UD,
        question.targets_S,
        question.negatives,
        temperature=question.temperature,
        target_log_q_T=question.target_log_q_S,
        negative_log_q_TR=question.negative_log_q,
    )


def shared_softmax(question: Question) -> torch.Tensor:
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


def full_softmax(question: Question) -> torch.Tensor:
    return full_softmax_loss(question.hidden_SD, question.rows_UD, question.targets_S, temperature=question.temperature)


def binary_cross_entropy(question: Question) -> torch.Tensor:
    """-log sigmoid(target) - sum over negatives of log(1 - sigmoid(negative)); negatives equal to the target are left out."""
    assert question.negatives is not None
    hidden_SD, rows_UD, temperature = question.hidden_SD, question.rows_UD, question.temperature

    def score(index_S: torch.Tensor) -> torch.Tensor:
        return (hidden_SD * take_rows(rows_UD, index_S)).sum(-1) / temperature

    def push_down(index_SC: torch.Tensor) -> torch.Tensor:
        logits_SC = torch.stack([score(index_S) for index_S in index_SC.unbind(1)], dim=1)
        return F.softplus(logits_SC).masked_fill(index_SC == question.targets_S.unsqueeze(1), 0.0).sum(1)

    loss_S = F.softplus(-score(question.targets_S))
    for index_SC in question.negatives.split(_KEPT_COLUMNS, dim=1):
        # Recomputed in the backward pass, so that the gathered rows of one group at most are alive.
        loss_S = loss_S + checkpoint(push_down, index_SC, use_reentrant=False, preserve_rng_state=False)
    return loss_S


@dataclass(frozen=True)
class RetrievalLoss:
    """One kind of retrieval loss: how it reads negatives, and whether samples of a batch see one another through it."""

    per_token: Callable[[Question], torch.Tensor]
    negatives: Literal["per_token", "shared", "catalogue"]
    mixes_samples: bool = False


RETRIEVAL_LOSSES = {
    "sampled_softmax": RetrievalLoss(sampled_softmax, "per_token"),
    "shared_softmax": RetrievalLoss(shared_softmax, "shared"),
    "full_softmax": RetrievalLoss(full_softmax, "catalogue"),
    "bce": RetrievalLoss(binary_cross_entropy, "per_token"),
}


def ranking_loss(logits_SA: torch.Tensor, labels_SA: torch.Tensor, weights_A: torch.Tensor) -> torch.Tensor:
    """Weighted binary cross-entropy summed over the actions: one value per supervised token."""
    return (F.binary_cross_entropy_with_logits(logits_SA, labels_SA, reduction="none") * weights_A).sum(1)
