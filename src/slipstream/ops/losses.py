"""Retrieval losses over embedding rows: sampled softmax, shared-negative softmax, full softmax.

Each returns one loss per token; the caller weighs and sums them. None stores tokens x negatives x
width or tokens x catalogue. The caller normalises hidden states and rows where its recipe wants
cosine similarity; gradients reach both. log_q, the log-probability with which an item is drawn as a
negative, corrects the logits and gets no gradient. Touch this when a loss gets another argument.
"""

from dataclasses import replace

import torch

from slipstream.ops import backend as backends
from slipstream.ops import losses_native, losses_reference, operand_checks
from slipstream.ops.losses_types import SoftmaxInputs


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
    inputs = SoftmaxInputs(
        hidden_TD, rows_UD, targets_T, negatives_TR, temperature, target_log_q_T, negative_log_q_TR
    )
    inputs = _check(inputs, (len(hidden_TD), None))
    chosen = backends.choose(backend, hidden_TD, has_triton=hidden_TD.dtype == torch.float32)
    if chosen == "triton":
        # Imported here: a machine without an accelerator need not have triton.
        from slipstream.ops import losses_triton as serve
    else:
        serve = losses_native if chosen == "native" else losses_reference
    loss_T: torch.Tensor = serve.sampled_softmax_loss(inputs)
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
    inputs = SoftmaxInputs(
        hidden_TD, rows_UD, targets_T, negatives_R, temperature, target_log_q_T, negative_log_q_R
    )
    inputs = _check(inputs, (None,))
    serve = losses_native if backends.choose(backend, hidden_TD) == "native" else losses_reference
    loss_T: torch.Tensor = serve.shared_softmax_loss(inputs)
    return loss_T


def full_softmax_loss(
    hidden_TD: torch.Tensor,
    rows_ND: torch.Tensor,
    targets_T: torch.Tensor,
    *,
    temperature: float = 1.0,
    backend: str | None = None,
) -> torch.Tensor:
    """-log softmax of each token's target row among all rows; gradients come with the loss."""
    _check_common(hidden_TD, rows_ND, targets_T, temperature)
    serve = losses_native if backends.choose(backend, hidden_TD) == "native" else losses_reference
    loss_T: torch.Tensor = serve.full_softmax_loss(hidden_TD, rows_ND, targets_T, temperature)
    return loss_T


def _check(inputs: SoftmaxInputs, shape: tuple[int | None, ...]) -> SoftmaxInputs:
    """Check the operands of a loss with negatives of `shape`; log_q comes back without gradient."""
    hidden_TD, rows_UD, negatives = inputs.hidden_TD, inputs.rows_UD, inputs.negatives
    _check_common(hidden_TD, rows_UD, inputs.targets_T, inputs.temperature)
    own, others = inputs.target_log_q_T, inputs.negative_log_q
    if own is not None:
        operand_checks.like("target_log_q", own, "hidden", hidden_TD, (hidden_TD.shape[0],))
        own = own.detach()
    operand_checks.index(
        "negatives", negatives, rows_UD.shape[0], shape=shape, device=hidden_TD.device
    )
    if others is not None:
        operand_checks.like("negative_log_q", others, "hidden", hidden_TD, tuple(negatives.shape))
        others = others.detach()
    return replace(inputs, target_log_q_T=own, negative_log_q=others)


def _check_common(
    hidden_TD: torch.Tensor, rows_UD: torch.Tensor, targets_T: torch.Tensor, temperature: float
) -> None:
    """Check the operands that all losses have."""
    operand_checks.floating("hidden", hidden_TD, dims=2)
    operand_checks.floating("rows", rows_UD, dims=2)
    operand_checks.like(
        "rows", rows_UD, "hidden", hidden_TD, (rows_UD.shape[0], hidden_TD.shape[1])
    )
    operand_checks.index(
        "targets", targets_T, rows_UD.shape[0], shape=(hidden_TD.shape[0],), device=hidden_TD.device
    )
    operand_checks.positive("temperature", temperature)
