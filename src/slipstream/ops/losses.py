"""Retrieval losses over embedding rows: sampled softmax, shared-negative softmax, full softmax.

Each returns one loss per token; the caller weighs and sums them. None stores tokens x negatives x
width or tokens x catalogue. The caller normalises hidden states and rows where its recipe wants
cosine similarity; gradients reach both. log_q, the log-probability with which an item is drawn as a
negative, corrects the logits and gets no gradient. Touch this when a loss gets another argument.
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
    """-log softmax of each token's target among itself and the token's R negatives, [T].

    `targets_T` and `negatives_TR` are indices into `rows_UD`. A negative equal to the token's
    target is left out.
    """
    target_log_q_T = _check_common(hidden_TD, rows_UD, targets_T, temperature, target_log_q_T)
    shape = (hidden_TD.shape[0], None)
    negative_log_q_TR = _check_negatives(hidden_TD, rows_UD, negatives_TR, shape, negative_log_q_TR)
    chosen = backends.choose(backend, hidden_TD, has_triton=hidden_TD.dtype == torch.float32)
    if chosen == "triton":
        # Imported here: a machine without an accelerator need not have triton.
        from slipstream.ops import losses_triton as serve
    else:
        serve = losses_native if chosen == "native" else losses_reference
    loss_T: torch.Tensor = serve.sampled_softmax_loss(
        hidden_TD, rows_UD, targets_T, negatives_TR, temperature, target_log_q_T, negative_log_q_TR
    )
    return loss_T


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
    """`sampled_softmax_loss` with one set of negatives for all tokens, in tiles of tokens."""
    target_log_q_T = _check_common(hidden_TD, rows_UD, targets_T, temperature, target_log_q_T)
    negative_log_q_R = _check_negatives(hidden_TD, rows_UD, negatives_R, (None,), negative_log_q_R)
    serve = losses_native if backends.choose(backend, hidden_TD) == "native" else losses_reference
    loss_T: torch.Tensor = serve.shared_softmax_loss(
        hidden_TD, rows_UD, targets_T, negatives_R, temperature, target_log_q_T, negative_log_q_R
    )
    return loss_T


def full_softmax_loss(
    hidden_TD: torch.Tensor,
    rows_ND: torch.Tensor,
    targets_T: torch.Tensor,
    *,
    temperature: float = 1.0,
    backend: str | None = None,
) -> torch.Tensor:
    """-log softmax of each token's target row among all rows, in tiles that backward recomputes."""
    _check_common(hidden_TD, rows_ND, targets_T, temperature, None)
    serve = losses_native if backends.choose(backend, hidden_TD) == "native" else losses_reference
    loss_T: torch.Tensor = serve.full_softmax_loss(hidden_TD, rows_ND, targets_T, temperature)
    return loss_T


def _check_common(
    hidden_TD: torch.Tensor,
    rows_UD: torch.Tensor,
    targets_T: torch.Tensor,
    temperature: float,
    target_log_q_T: torch.Tensor | None,
) -> torch.Tensor | None:
    """Check the operands all losses have; returns the targets' log_q without gradient."""
    operand_checks.floating("hidden", hidden_TD, dims=2)
    operand_checks.floating("rows", rows_UD, dims=2)
    operand_checks.like(
        "rows", rows_UD, "hidden", hidden_TD, (rows_UD.shape[0], hidden_TD.shape[1])
    )
    operand_checks.index(
        "targets", targets_T, rows_UD.shape[0], shape=(hidden_TD.shape[0],), device=hidden_TD.device
    )
    operand_checks.positive("temperature", temperature)
    if target_log_q_T is None:
        return None
    operand_checks.like("target_log_q", target_log_q_T, "hidden", hidden_TD, (hidden_TD.shape[0],))
    return target_log_q_T.detach()


def _check_negatives(
    hidden_TD: torch.Tensor,
    rows_UD: torch.Tensor,
    negatives: torch.Tensor,
    shape: tuple[int | None, ...],
    log_q: torch.Tensor | None,
) -> torch.Tensor | None:
    """Check the negatives of a loss; returns their log_q without gradient."""
    operand_checks.index(
        "negatives", negatives, rows_UD.shape[0], shape=shape, device=hidden_TD.device
    )
    if log_q is None:
        return None
    operand_checks.like("negative_log_q", log_q, "hidden", hidden_TD, tuple(negatives.shape))
    return log_q.detach()
