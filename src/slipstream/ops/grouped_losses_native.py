"""The grouped softmax through the compiled kernels of native/losses_grouped*.cpp.

Operands were checked by `slipstream.ops.grouped_losses`.
"""

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from slipstream.ops.grouped_inputs import GroupedSoftmaxInputs
from slipstream.ops.kernel_call import kernel
from slipstream.ops.rows_native import check_count
from slipstream.ops.token_groups import Groups, Scored, weight_places

_COPIES_BYTES = (
    1 << 24
)  # as for plain rows: one copy per thread where the copies together stay below this
_BUCKET_BYTES = 1 << 18
_MAX_BUCKETS = 4096


def _contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()


def block_of(groups: Groups) -> int:
    """How many tokens a row is scored with at once."""
    largest = groups.largest
    return 1 if largest <= 1 else 2 if largest == 2 else 4


def score(
    question: GroupedSoftmaxInputs,
    *,
    wanted: bool = True,
    block: int | None = None,
    weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Scored]:
    """loss_T and, where gradients are wanted, what they need; `weights` is where to put them
    (default: new memory).
    """
    q, groups = question, question.groups
    hidden_TD, targets_TD, rows_UD = (
        q.hidden_TD.contiguous(),
        q.targets_TD.contiguous(),
        q.rows_UD.contiguous(),
    )
    same_T, negatives_XR = q.same_T.contiguous(), q.negatives_XR.contiguous()
    (tokens, width), per_set = hidden_TD.shape, negatives_XR.shape[1]
    block = block or block_of(groups)
    places_G1 = weight_places(groups, per_set, block)
    if weights is None:
        weights = hidden_TD.new_empty(int(places_G1[-1]) if wanted else 0)
    loss_T, target_weights_T = (
        hidden_TD.new_empty(tokens),
        hidden_TD.new_empty(tokens if wanted else 0),
    )
    unit_TD = hidden_TD.new_empty(tokens if wanted else 0, width)
    kernel("ss_grouped_softmax", "pppppnnppnnfppiippppp")(
        hidden_TD, targets_TD, same_T, rows_UD, negatives_XR, width, rows_UD.shape[0], groups.offsets_G1.contiguous(),
        groups.set_offsets_G1.contiguous(), groups.count, per_set, 1.0 / q.temperature, _contiguous(q.target_log_q_T),
        _contiguous(q.negative_log_q_XR), wanted, block, places_G1, loss_T, weights, target_weights_T, unit_TD,
    )  # fmt: skip
    return loss_T, Scored(groups, per_set, block, places_G1, weights, target_weights_T, unit_TD)


def deal(keys_E: torch.Tensor, below: int, buckets: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(order_E int32, starts int64 [buckets + 1]): the entries in buckets of neighbouring keys,
    order kept within.
    """
    check_count(keys_E.numel(), "negatives")
    order_E, starts = (
        torch.empty(keys_E.numel(), dtype=torch.int32),
        torch.empty(buckets + 1, dtype=torch.int64),
    )
    counts = torch.empty(torch.get_num_threads() * buckets, dtype=torch.int64)
    kernel("ss_deal_entries", "pnnnppp")(
        keys_E, keys_E.numel(), below, buckets, order_E, starts, counts
    )
    return order_E, starts


def bucket_count(num_rows: int, width: int, entries: int) -> int:
    """Buckets of cache-sized neighbours, several for each thread, never more than entries are
    worth.
    """
    by_cache = -(-num_rows * width * 4 // _BUCKET_BYTES)
    return max(
        1,
        min(max(by_cache, 4 * torch.get_num_threads()), _MAX_BUCKETS, num_rows, 1 + entries // 64),
    )


def add_dealt(
    out_UD: torch.Tensor,
    source_TD: torch.Tensor,
    scored: Scored,
    group_of_set_X: torch.Tensor,
    order_E: torch.Tensor,
    starts: torch.Tensor,
    buckets: tuple[int, int],
    rows: torch.Tensor,
    *,
    by_position: bool,
) -> None:
    """Add the gradient of the negatives in some buckets into `out_UD`, at rows[entry] or
    (by_position) rows[place in the order].
    """
    kernel("ss_grouped_scatter", "pnpppnpppippnnpi")(
        out_UD, out_UD.shape[1], source_TD, scored.groups.offsets_G1, scored.groups.set_offsets_G1, scored.per_set, group_of_set_X,
        scored.places_G1, scored.weights, scored.block, order_E, starts, *buckets, rows, by_position,
    )  # fmt: skip


def negative_gradient(
    source_TD: torch.Tensor, scored: Scored, negatives_XR: torch.Tensor, num_rows: int
) -> torch.Tensor:
    """[U, D]: the gradient of all rows, from the tokens' hidden states times the gradient of their
    loss.
    """
    source_TD, width, threads = source_TD.contiguous(), source_TD.shape[1], torch.get_num_threads()
    groups, entries = scored.groups, negatives_XR.numel()
    if entries == 0 or num_rows == 0:
        return source_TD.new_zeros(num_rows, width)
    stride = -(-width // 16) * 16
    if threads * num_rows * stride * 4 <= _COPIES_BYTES and entries > 2 * threads * num_rows:
        out_UD, copies = (
            source_TD.new_empty(num_rows, width),
            source_TD.new_zeros(threads * num_rows * stride),
        )
        kernel("ss_grouped_copies", "pnnpppnnpppipn")(
            out_UD, num_rows, width, source_TD, groups.offsets_G1, groups.set_offsets_G1, groups.count, scored.per_set,
            negatives_XR, scored.places_G1, scored.weights, scored.block, copies, stride,
        )  # fmt: skip
        return out_UD
    out_UD = source_TD.new_zeros(num_rows, width)
    buckets = bucket_count(num_rows, width, entries)
    order_E, starts = deal(negatives_XR, num_rows, buckets)
    group_of_set_X = groups.of_sets().to(torch.int32)
    add_dealt(
        out_UD,
        source_TD,
        scored,
        group_of_set_X,
        order_E,
        starts,
        (0, buckets),
        negatives_XR,
        by_position=False,
    )
    return out_UD


class _GroupedSoftmax(torch.autograd.Function):
    """Forward keeps the weights and the gradient of hidden for a unit loss; backward scales and
    scatters.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden_TD: torch.Tensor,
        targets_TD: torch.Tensor,
        rows_UD: torch.Tensor,
        question: GroupedSoftmaxInputs,
    ) -> torch.Tensor:
        wanted = any(ctx.needs_input_grad)  # type: ignore[attr-defined]
        negatives_XR = question.negatives_XR.contiguous()
        loss_T, scored = score(question, wanted=wanted)
        if wanted:
            ctx.save_for_backward(hidden_TD, negatives_XR)
            ctx.scored, ctx.num_rows = scored, rows_UD.shape[0]  # type: ignore[attr-defined]
        return loss_T

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_T: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_TD, negatives_XR = ctx.saved_tensors  # type: ignore[attr-defined]
        scored: Scored = ctx.scored  # type: ignore[attr-defined]
        needs_hidden, needs_targets, needs_rows = ctx.needs_input_grad[:3]  # type: ignore[attr-defined]
        grad_T1 = grad_T.unsqueeze(1)
        source_TD = hidden_TD * grad_T1
        grad_hidden_TD = scored.unit_TD * grad_T1 if needs_hidden else None
        grad_targets_TD = (
            source_TD * scored.target_weights_T.unsqueeze(1) if needs_targets else None
        )
        num_rows = ctx.num_rows  # type: ignore[attr-defined]
        grad_rows_UD = (
            negative_gradient(source_TD, scored, negatives_XR, num_rows) if needs_rows else None
        )
        return grad_hidden_TD, grad_targets_TD, grad_rows_UD, None


def grouped_softmax_loss(question: GroupedSoftmaxInputs) -> torch.Tensor:
    """Each token against all negatives of its group."""
    return _GroupedSoftmax.apply(
        question.hidden_TD, question.targets_TD, question.rows_UD, question
    )
