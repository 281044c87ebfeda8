"""The retrieval losses in plain PyTorch; the other back-ends are tested against it.

Tokens are computed in slices that backward computes again, so neither tokens x negatives x width
nor tokens x catalogue is ever in memory. Touch this only when what a loss computes changes.
"""

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

from slipstream.ops.losses_types import SoftmaxInputs

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


def sampled_softmax_loss(inputs: SoftmaxInputs) -> torch.Tensor:
    """Each token against its own negatives."""
    hidden_TD, rows_UD, temperature = inputs.hidden_TD, inputs.rows_UD, inputs.temperature

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

    values_per_token = (inputs.negatives.shape[1] + 1) * max(hidden_TD.shape[1], 1)
    operands = (inputs.targets_T, inputs.negatives, inputs.target_log_q_T, inputs.negative_log_q)
    return sliced(piece, len(hidden_TD), values_per_token, hidden_TD, *operands)


def shared_softmax_loss(inputs: SoftmaxInputs) -> torch.Tensor:
    """All tokens against one set of negatives."""
    hidden_TD, rows_UD, temperature = inputs.hidden_TD, inputs.rows_UD, inputs.temperature
    negatives_R = inputs.negatives

    def piece(h_TD: torch.Tensor, t_T: torch.Tensor, tq_T: torch.Tensor | None) -> torch.Tensor:
        target_T1 = (h_TD * rows_UD[t_T]).sum(dim=1, keepdim=True) / temperature
        negative_TR = h_TD @ rows_UD[negatives_R].T / temperature
        target_T1 = subtract(target_T1, None if tq_T is None else tq_T.unsqueeze(1))
        negative_TR = subtract(negative_TR, inputs.negative_log_q)
        return target_loss(target_T1, negative_TR, negatives_R == t_T.unsqueeze(1))

    values_per_token = len(negatives_R) + hidden_TD.shape[1]
    operands = (inputs.targets_T, inputs.target_log_q_T)
    return sliced(piece, len(hidden_TD), values_per_token, hidden_TD, *operands)


def full_softmax_loss(
    hidden_TD: torch.Tensor, rows_ND: torch.Tensor, targets_T: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Each token against the whole catalogue."""

    def piece(h_TD: torch.Tensor, t_T: torch.Tensor) -> torch.Tensor:
        logits_TN = h_TD @ rows_ND.T / temperature
        return torch.logsumexp(logits_TN, dim=1) - logits_TN.gather(1, t_T.unsqueeze(1)).squeeze(1)

    return sliced(piece, len(hidden_TD), len(rows_ND), hidden_TD, targets_T)
