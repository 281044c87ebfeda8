"""The row operators through the compiled kernels of native/rows_*.cpp.

Operands are checked by `slipstream.ops.rows`. Touch this together with those kernels.
"""

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from slipstream.ops.kernel_call import apply, kernel

_COPIES_BYTES = 1 << 24  # rows are summed in one copy per thread where all copies stay below this
_BUCKET_BYTES = 1 << 18  # rows of one bucket should stay in a core's cache
_MAX_BUCKETS = 4096
_MAX_ENTRIES = 1 << 22  # entries sorted into buckets at a time: 48 MB of scratch
_NARROW_SPAN = 1 << 16  # keys within such a range are marked in a table instead of sorted


def check_count(count: int, what: str) -> None:
    """The kernels number things in 32 bits (keys themselves are 64-bit)."""
    if count >= 1 << 31:
        raise ValueError(
            f"native kernels take at most 2^31 - 1 {what} at a time, got {count}; use "
            "backend='reference'"
        )


def scatter_rows(
    source_TD: torch.Tensor,
    index_TR: torch.Tensor,
    weights_TR: torch.Tensor | None,
    num_rows: int,
    into_UD: torch.Tensor | None = None,
) -> torch.Tensor:
    """[num_rows, D]: the sum over (t, r) of weights[t, r] * source[t] at row index[t, r].

    The sum is added to `into_UD` where that is given.
    """
    check_count(num_rows, "rows")
    source_TD, index_TR = source_TD.contiguous(), index_TR.contiguous()
    weights_TR = None if weights_TR is None else weights_TR.contiguous()
    tokens, width = source_TD.shape
    per_token = index_TR.numel() // max(tokens, 1)
    threads = torch.get_num_threads()
    stride = -(-width // 16) * 16
    copies_size = threads * (num_rows + 1) * stride
    if (
        into_UD is None
        and 0 < copies_size * 4 <= _COPIES_BYTES
        and index_TR.numel() > 2 * threads * num_rows
    ):
        out_UD = source_TD.new_empty(num_rows, width)
        copies = source_TD.new_zeros(copies_size)
        kernel("ss_scatter_copies")(
            out_UD, num_rows, width, source_TD, tokens, per_token, index_TR, weights_TR, copies,
            stride,
        )  # fmt: skip
        return out_UD
    out_UD = source_TD.new_zeros(num_rows, width) if into_UD is None else into_UD
    if out_UD.numel() and index_TR.numel():
        _scatter_in_buckets(out_UD, source_TD, index_TR, weights_TR, per_token)
    return out_UD


def _bucket_shift(num_rows: int, width: int, threads: int) -> int:
    """log2 of the rows in a bucket: cache-sized, several buckets per thread, not too many."""
    rows = max(1, min(_BUCKET_BYTES // (4 * width), num_rows // (4 * threads)))
    rows = max(rows, -(-num_rows // _MAX_BUCKETS))
    return max(rows - 1, 0).bit_length()


def _scatter_in_buckets(
    out_UD: torch.Tensor,
    source_TD: torch.Tensor,
    index_TR: torch.Tensor,
    weights_TR: torch.Tensor | None,
    per_token: int,
) -> None:
    num_rows, width = out_UD.shape
    threads = torch.get_num_threads()
    shift = _bucket_shift(num_rows, width, threads)
    buckets = ((num_rows - 1) >> shift) + 1
    step = max(1, _MAX_ENTRIES // per_token)
    entries = torch.empty(min(step, len(source_TD)) * per_token, 3, dtype=torch.int32)
    starts = torch.empty(threads * buckets, dtype=torch.int64)
    call = kernel("ss_scatter_buckets")
    for start in range(0, len(source_TD), step):
        piece_TD, index = source_TD[start : start + step], index_TR[start : start + step]
        weights = None if weights_TR is None else weights_TR[start : start + step]
        call(
            out_UD, num_rows, width, piece_TD, len(piece_TD), per_token, index, weights, shift,
            entries, starts,
        )  # fmt: skip


class _TakeRows(torch.autograd.Function):
    """Gather; backward sums the gradients of each row in a fixed order."""

    @staticmethod
    def forward(ctx: FunctionCtx, rows_UD: torch.Tensor, index_T: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index_T)
        ctx.num_rows = rows_UD.shape[0]  # type: ignore[attr-defined]
        return rows_UD.index_select(0, index_T)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_TD: torch.Tensor) -> tuple[torch.Tensor, None]:
        (index_T,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return scatter_rows(grad_TD, index_T, None, ctx.num_rows), None  # type: ignore[attr-defined]


def take_rows(rows_UD: torch.Tensor, index_T: torch.Tensor) -> torch.Tensor:
    """rows[index] with a deterministic backward."""
    return apply(_TakeRows, rows_UD, index_T)


def coalesce(grads_TD: torch.Tensor, inverse_T: torch.Tensor, num_unique: int) -> torch.Tensor:
    """The sum of the gradients that share a place."""
    return scatter_rows(grads_TD.detach(), inverse_T, None, num_unique)


def unique_keys(keys_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorted unique keys, and for each key its place among them.

    Keys of a narrow range are marked in a table; others are sorted (radix sort).
    """
    keys_T = keys_T.contiguous()
    count, inverse_T = keys_T.numel(), torch.empty_like(keys_T)
    if count == 0:
        return keys_T.clone(), inverse_T
    check_count(count, "keys")
    low, high = (int(x) for x in torch.aminmax(keys_T))
    span = high - low + 1
    if span <= max(_NARROW_SPAN, 4 * count):
        marks = torch.zeros(torch.get_num_threads(), span, dtype=torch.uint8)
        ranks, unique_U = keys_T.new_empty(span), keys_T.new_empty(min(count, span))
        found = kernel("ss_unique_narrow")(
            keys_T, count, low, span, marks, ranks, unique_U, inverse_T
        )
    else:
        unique_U = keys_T.new_empty(count)
        keys, places = keys_T.new_empty(2, count), torch.empty(2, count, dtype=torch.int32)
        found = kernel("ss_unique_wide")(keys_T, count, keys, places, unique_U, inverse_T)
    return unique_U[:found].clone(), inverse_T


def rowwise_adagrad_(
    weights_ND: torch.Tensor,
    state_N: torch.Tensor,
    rows_U: torch.Tensor,
    grads_UD: torch.Tensor,
    lr: float,
    eps: float,
) -> None:
    """One Adagrad step of the given rows, with one accumulator per row."""
    rows_U, grads_UD = rows_U.contiguous(), grads_UD.contiguous()
    kernel("ss_rowwise_adagrad")(weights_ND, state_N, rows_U, grads_UD, *grads_UD.shape, lr, eps)


def rowwise_adam_(
    weights_ND: torch.Tensor,
    m_ND: torch.Tensor,
    v_N: torch.Tensor,
    steps_N: torch.Tensor,
    rows_U: torch.Tensor,
    grads_UD: torch.Tensor,
    lr: float,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """One Adam step of the given rows: a first moment per value, one second moment per row."""
    rows_U, grads_UD = rows_U.contiguous(), grads_UD.contiguous()
    kernel("ss_rowwise_adam")(
        weights_ND, m_ND, v_N, steps_N, rows_U, grads_UD, *grads_UD.shape, lr, *betas, eps
    )
