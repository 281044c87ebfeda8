"""The retrieval losses in plain PyTorch; the other back-ends are tested against it.

Tokens are computed in slices that backward computes again, so neither tokens x negatives x width
nor tokens x catalogue is ever in memory. Touch this only when what a loss computes changes.
"""

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

VALUES_PER_SLICE = 1 << 23


def sliced(
    function: Callable[..., torch.Tensor],
    tokens: int,
    values_per_token: int,
    *per_token: torch.Tensor | None,
) -> torch.Tensor:
    """Apply `function` to slices of the per-token tensors; backward computes each slice again."""
    step = max(1, VALUES_PER_SLICE // max(values_per_token, 1))
    if tokens <= step:
        return function(*per_token)
    pieces = [
        checkpoint(
            function,
            *(None if x is None else x[start : start + step] for x in per_token),
            use_reentrant=False,
            preserve_rng_state=False,
        )
        for start in range(0, max(tokens, 1), step)
    ]
    return torch.cat(pieces)


def subtract(logits: torch.Tensor, log_q: torch.Tensor | None) -> torch.Tensor:
    """Logits corrected by the log-probability of being drawn, where one is given."""
    return logits if log_q is None else logits - log_q


def target_loss(
    target_T1: torch.Tensor, negative_TR: torch.Tensor, collides_TR: torch.Tensor
) -> torch.Tensor:
    """-log softmax of the target among itself and the negatives that are not the target."""
    logits = torch.cat([target_T1, negative_TR.masked_fill(collides_TR, float("-inf"))], dim=1)
    return torch.logsumexp(logits, dim=1) - target_T1.squeeze(1)


def sampled_softmax_loss(
    hidden_TD: torch.Tensor,
    rows_UD: torch.Tensor,
    targets_T: torch.Tensor,
    negatives_TR: torch.Tensor,
    temperature: float,
    target_log_q_T: torch.Tensor | None,
    negative_log_q_TR: torch.Tensor | None,
) -> torch.Tensor:
    """Each token against its own negatives."""

    def piece(
        h_TD: torch.Tensor,
        t_T: torch.Tensor,
        n_TR: torch.Tensor,
        tq_T: torch.Tensor | None,
        nq_TR: torch.Tensor | None,
    ) -> torch.Tensor:
        target_T1 = (h_TD * rows_UD[t_T]).sum(dim=1, keepdim=True) / temperature
        negative_TR = torch.einsum("td,trd->tr", h_TD, rows_UD[n_TR]) / temperature
        target_T1 = subtract(target_T1, None if tq_T is None else tq_T.unsqueeze(1))
        return target_loss(target_T1, subtract(negative_TR, nq_TR), n_TR == t_T.unsqueeze(1))

    values_per_token = (negatives_TR.shape[1] + 1) * max(hidden_TD.shape[1], 1)
    per_token = (hidden_TD, targets_T, negatives_TR, target_log_q_T, negative_log_q_TR)
    return sliced(piece, len(hidden_TD), values_per_token, *per_token)


def shared_softmax_loss(
    hidden_TD: torch.Tensor,
    rows_UD: torch.Tensor,
    targets_T: torch.Tensor,
    negatives_R: torch.Tensor,
    temperature: float,
    target_log_q_T: torch.Tensor | None,
    negative_log_q_R: torch.Tensor | None,
) -> torch.Tensor:
    """All tokens against one set of negatives."""

    def piece(h_TD: torch.Tensor, t_T: torch.Tensor, tq_T: torch.Tensor | None) -> torch.Tensor:
        target_T1 = (h_TD * rows_UD[t_T]).sum(dim=1, keepdim=True) / temperature
        negative_TR = h_TD @ rows_UD[negatives_R].T / temperature
        target_T1 = subtract(target_T1, None if tq_T is None else tq_T.unsqueeze(1))
        negative_TR = subtract(negative_TR, negative_log_q_R)
        return target_loss(target_T1, negative_TR, negatives_R == t_T.unsqueeze(1))

    values_per_token = len(negatives_R) + hidden_TD.shape[1]
    return sliced(piece, len(hidden_TD), values_per_token, hidden_TD, targets_T, target_log_q_T)


def full_softmax_loss(
    hidden_TD: torch.Tensor, rows_ND: torch.Tensor, targets_T: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Each token against the whole catalogue."""

    def piece(h_TD: torch.Tensor, t_T: torch.Tensor) -> torch.Tensor:
        logits_TN = h_TD @ rows_ND.T / temperature
        return torch.logsumexp(logits_TN, dim=1) - logits_TN.gather(1, t_T.unsqueeze(1)).squeeze(1)

    return sliced(piece, len(hidden_TD), len(rows_ND), hidden_TD, targets_T)
