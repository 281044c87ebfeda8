"""Row operators through the compiled kernels of native/rows_*.cpp. Operands were checked by `slipstream.ops.rows`."""

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from slipstream.ops.kernel_call import kernel

_COPIES_BYTES = 1 << 20  # rows up to this size are summed in one copy per thread
_BUCKET_BYTES = 1 << 18  # rows of one bucket should stay in a core's cache
_MAX_BUCKETS = 4096
_MAX_ENTRIES = 1 << 22  # entries dealt at a time: 48 MB of scratch


def scatter_rows(
    source_TD: torch.Tensor,
    index_TR: torch.Tensor,
    weights_TR: torch.Tensor | None,
    num_rows: int,
    into_UD: torch.Tensor | None = None,
) -> torch.Tensor:
    """[num_rows, D]: sum over (t, r) of weights[t, r] * source[t] at row index[t, r]; added to `into_UD` where that is given."""
    source_TD, index_TR = source_TD.contiguous(), index_TR.contiguous()
    weights_TR = None if weights_TR is None else weights_TR.contiguous()
    tokens, width = source_TD.shape
    per_token = index_TR.numel() // max(tokens, 1)
    threads = torch.get_num_threads()
    size = num_rows * width
    if into_UD is None and size * 4 <= _COPIES_BYTES and index_TR.numel() * threads > num_rows:
        out_UD = source_TD.new_empty(num_rows, width)
        copies = source_TD.new_zeros(threads, num_rows, width)
        call = kernel("ss_scatter_copies", "pnnpnnppp")
        call(out_UD, num_rows, width, source_TD, tokens, per_token, index_TR, weights_TR, copies)
        return out_UD
    out_UD = source_TD.new_zeros(num_rows, width) if into_UD is None else into_UD
    if size and index_TR.numel():
        _scatter_in_buckets(out_UD, source_TD, index_TR, weights_TR, per_token)
    return out_UD


def _bucket_shift(num_rows: int, width: int, threads: int) -> int:
    """log2 of the rows in a bucket: cache-sized, several buckets for each thread, and never too many of them."""
    rows = max(1, min(_BUCKET_BYTES // (4 * width), num_rows // (4 * threads)))
    rows = max(rows, -(-num_rows // _MAX_BUCKETS))
    return max(rows - 1, 0).bit_length()


def _scatter_in_buckets(
    out_UD: torch.Tensor, source_TD: torch.Tensor, index_TR: torch.Tensor, weights_TR: torch.Tensor | None, per_token: int
) -> None:
    num_rows, width = out_UD.shape
    threads = torch.get_num_threads()
    shift = _bucket_shift(num_rows, width, threads)
    buckets = ((num_rows - 1) >> shift) + 1
    step = max(1, _MAX_ENTRIES // per_token)
    entries = torch.empty(min(step, len(source_TD)) * per_token, 3, dtype=torch.int32)
    starts = torch.empty(threads * buckets, dtype=torch.int64)
    call = kernel("ss_scatter_buckets", "pnnpnnppipp")
    for start in range(0, len(source_TD), step):
        piece_TD, index = source_TD[start : start + step], index_TR[start : start + step]
        weights = None if weights_TR is None else weights_TR[start : start + step]
        call(out_UD, num_rows, width, piece_TD, len(piece_TD), per_token, index, weights, shift, entries, starts)


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
    return _TakeRows.apply(rows_UD, index_T)


def coalesce(grads_TD: torch.Tensor, inverse_T: torch.Tensor, num_unique: int) -> torch.Tensor:
    """The sum of the gradients that share a place."""
    return scatter_rows(grads_TD.detach(), inverse_T, None, num_unique)
