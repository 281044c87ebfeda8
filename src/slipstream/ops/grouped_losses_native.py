"""The grouped softmax through the compiled kernels of native/losses_grouped*.cpp.

Operands are checked by `slipstream.ops.grouped_losses`. Touch this together with those kernels.
"""

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from slipstream.ops.grouped_types import (
    GroupedSoftmaxInputs,
    GroupWeights,
    TokenGroups,
    weight_starts,
)
from slipstream.ops.kernel_call import apply, kernel
from slipstream.ops.rows_native import check_count

_COPIES_BYTES = 1 << 24  # one copy of the rows per thread where all copies stay below this
_BUCKET_BYTES = 1 << 18
_MAX_BUCKETS = 4096


def _contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()


def block_size(groups: TokenGroups) -> int:
    """How many tokens a row is weights with at once."""
    largest = groups.largest
    return 1 if largest <= 1 else 2 if largest == 2 else 4


def score(
    inputs: GroupedSoftmaxInputs,
    *,
    gradients: bool = True,
    block: int | None = None,
    weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, GroupWeights]:
    """loss_T, and with `gradients` what they need; `weights` is memory for them, if given."""
    q, groups = inputs, inputs.groups
    hidden_TD, rows_UD = q.hidden_TD.contiguous(), q.rows_UD.contiguous()
    (tokens, width), per_set = hidden_TD.shape, q.negatives_XR.shape[1]
    block = block or block_size(groups)
    starts_G1 = weight_starts(groups, per_set, block)
    if weights is None:
        weights = hidden_TD.new_empty(int(starts_G1[-1]) if gradients else 0)
    kept = tokens if gradients else 0
    loss_T, target_weights_T = hidden_TD.new_empty(tokens), hidden_TD.new_empty(kept)
    unit_TD = hidden_TD.new_empty(kept, width)
    kernel("ss_grouped_softmax")(
        hidden_TD, q.targets_TD.contiguous(), q.same_T.contiguous(), rows_UD,
        q.negatives_XR.contiguous(), width, rows_UD.shape[0], groups.offsets_G1.contiguous(),
        groups.set_offsets_G1.contiguous(), groups.count, per_set, 1.0 / q.temperature,
        _contiguous(q.target_log_q_T), _contiguous(q.negative_log_q_XR), gradients, block,
        starts_G1, loss_T, weights, target_weights_T, unit_TD,
    )  # fmt: skip
    kept_weights = GroupWeights(
        groups, per_set, block, starts_G1, weights, target_weights_T, unit_TD
    )
    return loss_T, kept_weights


def sort_into_buckets(
    keys_E: torch.Tensor, below: int, buckets: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Order the entries by bucket of near keys: (order_E int32, starts int64 [buckets + 1])."""
    check_count(keys_E.numel(), "negatives")
    order_E = torch.empty(keys_E.numel(), dtype=torch.int32)
    starts = torch.empty(buckets + 1, dtype=torch.int64)
    counts = torch.empty(torch.get_num_threads() * buckets, dtype=torch.int64)
    kernel("ss_bucket_entries")(keys_E, keys_E.numel(), below, buckets, order_E, starts, counts)
    return order_E, starts


def bucket_count(num_rows: int, width: int, entries: int) -> int:
    """How many buckets: of cache-sized rows, several for each thread, fewer for few entries."""
    by_cache = -(-num_rows * width * 4 // _BUCKET_BYTES)
    return max(
        1,
        min(max(by_cache, 4 * torch.get_num_threads()), _MAX_BUCKETS, num_rows, 1 + entries // 64),
    )


def add_bucket_gradients(
    out_UD: torch.Tensor,
    source_TD: torch.Tensor,
    weights: GroupWeights,
    group_of_set_X: torch.Tensor,
    order_E: torch.Tensor,
    starts: torch.Tensor,
    buckets: tuple[int, int],
    rows: torch.Tensor,
    *,
    by_position: bool,
) -> None:
    """Add the gradients of the negatives in buckets first … last - 1 to rows of `out_UD`.

    The row of an entry is rows[entry], or with `by_position` rows[its place in these buckets].
    """
    groups = weights.groups
    kernel("ss_grouped_scatter")(
        out_UD, out_UD.shape[1], source_TD, groups.offsets_G1, groups.set_offsets_G1,
        weights.per_set, group_of_set_X, weights.starts_G1, weights.weights, weights.block, order_E,
        starts, *buckets, rows, by_position,
    )  # fmt: skip


def negative_gradient(
    source_TD: torch.Tensor, weights: GroupWeights, negatives_XR: torch.Tensor, num_rows: int
) -> torch.Tensor:
    """[U, D]: the gradient of all rows; `source_TD` is hidden times the gradient of the loss."""
    source_TD, width, threads = source_TD.contiguous(), source_TD.shape[1], torch.get_num_threads()
    groups, entries = weights.groups, negatives_XR.numel()
    if entries == 0 or num_rows == 0:
        return source_TD.new_zeros(num_rows, width)
    stride = -(-width // 16) * 16
    if threads * num_rows * stride * 4 <= _COPIES_BYTES and entries > 2 * threads * num_rows:
        out_UD = source_TD.new_empty(num_rows, width)
        copies = source_TD.new_zeros(threads * num_rows * stride)
        kernel("ss_grouped_copies")(
            out_UD, num_rows, width, source_TD, groups.offsets_G1, groups.set_offsets_G1,
            groups.count, weights.per_set, negatives_XR, weights.starts_G1, weights.weights,
            weights.block, copies, stride,
        )  # fmt: skip
        return out_UD
    out_UD = source_TD.new_zeros(num_rows, width)
    buckets = bucket_count(num_rows, width, entries)
    order_E, starts = sort_into_buckets(negatives_XR, num_rows, buckets)
    group_of_set_X = groups.of_sets().to(torch.int32)
    add_bucket_gradients(
        out_UD, source_TD, weights, group_of_set_X, order_E, starts, (0, buckets), negatives_XR,
        by_position=False,
    )  # fmt: skip
    return out_UD


class _GroupedSoftmax(torch.autograd.Function):
    """Forward keeps the weights and hidden's gradient for a unit loss; backward scales them."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden_TD: torch.Tensor,
        targets_TD: torch.Tensor,
        rows_UD: torch.Tensor,
        inputs: GroupedSoftmaxInputs,
    ) -> torch.Tensor:
        gradients = any(ctx.needs_input_grad)  # type: ignore[attr-defined]
        negatives_XR = inputs.negatives_XR.contiguous()
        loss_T, weights = score(inputs, gradients=gradients)
        if gradients:
            ctx.save_for_backward(hidden_TD, negatives_XR)
            ctx.weights, ctx.num_rows = weights, rows_UD.shape[0]  # type: ignore[attr-defined]
        return loss_T

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_T: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_TD, negatives_XR = ctx.saved_tensors  # type: ignore[attr-defined]
        weights: GroupWeights = ctx.weights  # type: ignore[attr-defined]
        needs_hidden, needs_targets, needs_rows = ctx.needs_input_grad[:3]  # type: ignore[attr-defined]
        grad_T1 = grad_T.unsqueeze(1)
        source_TD = hidden_TD * grad_T1
        grad_hidden_TD = weights.unit_TD * grad_T1 if needs_hidden else None
        grad_targets_TD = (
            source_TD * weights.target_weights_T.unsqueeze(1) if needs_targets else None
        )
        num_rows = ctx.num_rows  # type: ignore[attr-defined]
        grad_rows_UD = (
            negative_gradient(source_TD, weights, negatives_XR, num_rows) if needs_rows else None
        )
        return grad_hidden_TD, grad_targets_TD, grad_rows_UD, None


def grouped_softmax_loss(inputs: GroupedSoftmaxInputs) -> torch.Tensor:
    """Each token against all negatives of its group."""
    return apply(_GroupedSoftmax, inputs.hidden_TD, inputs.targets_TD, inputs.rows_UD, inputs)
