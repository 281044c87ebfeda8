"""Retrieval losses over embedding rows: sampled softmax, shared-negative softmax, full softmax.

Each returns one loss per token (the caller weighs and sums them). None stores tokens x negatives x
width or tokens x catalogue. The caller normalises hidden states and rows where its recipe wants
cosine similarity; gradients reach both. log_q, the log of the chance with which an item is drawn as
a negative, corrects the logits and takes no gradient.
"""

import torch

from slipstream.ops import backend as backends
from slipstream.ops import losses_native, losses_reference, operand_checks


def sampled_softmax_loss(
    hidden_TD: torch.Tensor,
    rows_UD: torch.Tensor,
    targets_T: torch.Tensor,
    negatives_TR: torch.Tensor,
    *,
    temperature: float = 1.0,
    target_log_q_T: torch.Tensor | None = None,
    negative_log_q_TR: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """-log softmax of each token's target among itself and the token's R negatives; a negative
    equal to its target is left out.

    `targets_T` and `negatives_TR` are indices into `rows_UD`.
    """
    _check_common(hidden_TD, rows_UD, targets_T, temperature, target_log_q_T)
    tokens = hidden_TD.shape[0]
    operand_checks.index(
        "negatives", negatives_TR, rows_UD.shape[0], shape=(tokens, None), device=hidden_TD.device
    )
    if negative_log_q_TR is not None:
        operand_checks.like(
            "negative_log_q", negative_log_q_TR, "hidden", hidden_TD, tuple(negatives_TR.shape)
        )
        negative_log_q_TR = negative_log_q_TR.detach()
    target_log_q_T = None if target_log_q_T is None else target_log_q_T.detach()
    chosen = backends.choose(backend, hidden_TD, has_triton=hidden_TD.dtype == torch.float32)
    if chosen == "triton":
        from slipstream.ops import (
            losses_triton as serve,  # triton is an extra, loaded where it serves
        )
    else:
        serve = losses_native if chosen == "native" else losses_reference
    return serve.sampled_softmax_loss(
        hidden_TD, rows_UD, targets_T, negatives_TR, temperature, target_log_q_T, negative_log_q_TR
    )


def shared_softmax_loss(
    hidden_TD: torch.Tensor,
    rows_UD: torch.Tensor,
    targets_T: torch.Tensor,
    negatives_R: torch.Tensor,
    *,
    temperature: float = 1.0,
    target_log_q_T: torch.Tensor | None = None,
    negative_log_q_R: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """`sampled_softmax_loss` with one set of negatives for all tokens: a matrix product, tiled over
    tokens.
    """
    _check_common(hidden_TD, rows_UD, targets_T, temperature, target_log_q_T)
    operand_checks.index(
        "negatives", negatives_R, rows_UD.shape[0], shape=(None,), device=hidden_TD.device
    )
    if negative_log_q_R is not None:
        operand_checks.like(
            "negative_log_q", negative_log_q_R, "hidden", hidden_TD, tuple(negatives_R.shape)
        )
        negative_log_q_R = negative_log_q_R.detach()
    target_log_q_T = None if target_log_q_T is None else target_log_q_T.detach()
    serve = losses_native if backends.choose(backend, hidden_TD) == "native" else losses_reference
    return serve.shared_softmax_loss(
        hidden_TD, rows_UD, targets_T, negatives_R, temperature, target_log_q_T, negative_log_q_R
    )


def full_softmax_loss(
    hidden_TD: torch.Tensor,
    rows_ND: torch.Tensor,
    targets_T: torch.Tensor,
    *,
    temperature: float = 1.0,
    backend: str | None = None,
) -> torch.Tensor:
    """-log softmax of each token's target row among all rows, in tiles that backward computes
    again.
    """
    _check_common(hidden_TD, rows_ND, targets_T, temperature, None)
    serve = losses_native if backends.choose(backend, hidden_TD) == "native" else losses_reference
    return serve.full_softmax_loss(hidden_TD, rows_ND, targets_T, temperature)


def _check_common(
    hidden_TD: torch.Tensor,
    rows_UD: torch.Tensor,
    targets_T: torch.Tensor,
    temperature: float,
    target_log_q_T: torch.Tensor | None,
) -> None:
    operand_checks.floating("hidden", hidden_TD, dims=2)
    operand_checks.floating("rows", rows_UD, dims=2)
    operand_checks.like(
        "rows", rows_UD, "hidden", hidden_TD, (rows_UD.shape[0], hidden_TD.shape[1])
    )
    operand_checks.index(
        "targets", targets_T, rows_UD.shape[0], shape=(hidden_TD.shape[0],), device=hidden_TD.device
    )
    operand_checks.positive("temperature", temperature)
    if target_log_q_T is not None:
        operand_checks.like(
            "target_log_q", target_log_q_T, "hidden", hidden_TD, (hidden_TD.shape[0],)
        )
