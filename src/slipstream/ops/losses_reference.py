"""Plain PyTorch of the retrieval losses: the oracle of the other back-ends.

Even here memory stays bounded: tokens go through in slices that backward computes again, so neither
tokens x negatives x width nor tokens x catalogue is ever alive.
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
    """function over slices of the per-token tensors, each slice recomputed in backward; results
    concatenated.
    """
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
        target_T1 = target_T1 if tq_T is None else target_T1 - tq_T.unsqueeze(1)
        negative_TR = negative_TR if nq_TR is None else negative_TR - nq_TR
        return target_loss(target_T1, negative_TR, n_TR == t_T.unsqueeze(1))

    values_per_token = (negatives_TR.shape[1] + 1) * max(hidden_TD.shape[1], 1)
    return sliced(
        piece,
        len(hidden_TD),
        values_per_token,
        hidden_TD,
        targets_T,
        negatives_TR,
        target_log_q_T,
        negative_log_q_TR,
    )


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
        target_T1 = target_T1 if tq_T is None else target_T1 - tq_T.unsqueeze(1)
        negative_TR = negative_TR if negative_log_q_R is None else negative_TR - negative_log_q_R
        return target_loss(target_T1, negative_TR, negatives_R == t_T.unsqueeze(1))

    return sliced(
        piece,
        len(hidden_TD),
        len(negatives_R) + hidden_TD.shape[1],
        hidden_TD,
        targets_T,
        target_log_q_T,
    )


def full_softmax_loss(
    hidden_TD: torch.Tensor, rows_ND: torch.Tensor, targets_T: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Each token against the whole catalogue."""

    def piece(h_TD: torch.Tensor, t_T: torch.Tensor) -> torch.Tensor:
        logits_TN = h_TD @ rows_ND.T / temperature
        return torch.logsumexp(logits_TN, dim=1) - logits_TN.gather(1, t_T.unsqueeze(1)).squeeze(1)

    return sliced(piece, len(hidden_TD), len(rows_ND), hidden_TD, targets_T)
