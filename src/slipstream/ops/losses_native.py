"""The retrieval losses through the compiled kernels of native/losses_*.cpp.

Operands are checked by `slipstream.ops.losses`. Touch this together with those kernels.
"""

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from slipstream.ops.kernel_call import apply, kernel
from slipstream.ops.losses_tiled_native import full_softmax_loss, shared_softmax_loss
from slipstream.ops.losses_types import SoftmaxInputs
from slipstream.ops.rows_native import scatter_rows

__all__ = ["full_softmax_loss", "sampled_softmax_loss", "shared_softmax_loss"]


def _contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()


class _NativeSampledSoftmax(torch.autograd.Function):
    """Forward keeps the weights and hidden's gradient for a unit loss; backward scales them."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden_TD: torch.Tensor,
        rows_UD: torch.Tensor,
        inputs: SoftmaxInputs,
    ) -> torch.Tensor:
        hidden_TD, rows_UD = hidden_TD.contiguous(), rows_UD.contiguous()
        targets_T, negatives_TR = inputs.targets_T.contiguous(), inputs.negatives.contiguous()
        (tokens, width), negatives = hidden_TD.shape, negatives_TR.shape[1]
        gradients = any(ctx.needs_input_grad)  # type: ignore[attr-defined]
        loss_T, target_weights_T = hidden_TD.new_empty(tokens), hidden_TD.new_empty(tokens)
        weights = hidden_TD.new_empty(tokens if gradients else torch.get_num_threads(), negatives)
        unit_TD = hidden_TD.new_empty(tokens if gradients else 0, width)
        kernel("ss_sampled_softmax")(
            hidden_TD, rows_UD, targets_T, negatives_TR, tokens, negatives, width, rows_UD.shape[0],
            1.0 / inputs.temperature, _contiguous(inputs.target_log_q_T),
            _contiguous(inputs.negative_log_q), gradients, loss_T, weights, target_weights_T,
            unit_TD,
        )  # fmt: skip
        if gradients:
            ctx.save_for_backward(
                hidden_TD, targets_T, negatives_TR, weights, target_weights_T, unit_TD
            )
            ctx.num_rows = rows_UD.shape[0]  # type: ignore[attr-defined]
        return loss_T

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_T: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors  # type: ignore[attr-defined]
        hidden_TD, targets_T, negatives_TR, weights_TR, target_weights_T, unit_TD = saved
        needs_hidden, needs_rows = ctx.needs_input_grad[:2]  # type: ignore[attr-defined]
        grad_T1 = grad_T.unsqueeze(1)
        grad_hidden_TD = unit_TD * grad_T1 if needs_hidden else None
        grad_rows_UD = None
        if needs_rows:
            source_TD = hidden_TD * grad_T1
            grad_rows_UD = scatter_rows(source_TD, negatives_TR, weights_TR, ctx.num_rows)  # type: ignore[attr-defined]
            grad_rows_UD = scatter_rows(
                source_TD, targets_T, target_weights_T, len(grad_rows_UD), into_UD=grad_rows_UD
            )
        return grad_hidden_TD, grad_rows_UD, None


def sampled_softmax_loss(inputs: SoftmaxInputs) -> torch.Tensor:
    """Each token against its own negatives."""
    return apply(_NativeSampledSoftmax, inputs.hidden_TD, inputs.rows_UD, inputs)
