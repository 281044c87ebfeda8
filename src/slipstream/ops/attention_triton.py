"""The attention operators as Triton kernels, for CUDA and (through triton-ascend) Ascend devices.

One program serves a block of queries (forward, and backward for the queries and the bias tables) or
a block of keys (backward for keys and values) of one head. Scores and biases are computed tile by
tile from positions and timestamps and never stored. Time buckets come from a binary search over the
exact integer borders (SEARCH steps); SEARCH = 0 means that the time bias is a function of the gap,
whose a, b and c stand in the place of the table. Gradients of tables and of a, b, c are added
atomically, so on a device their last bits may differ from run to run. The kernels have run only in
Triton's interpreter on a CPU, never on an accelerator. Touch this when what attention computes
changes.
"""
# The bodies of the kernels are Triton's language, not Python's.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Any

import torch
import triton
import triton.language as tl

from slipstream.ops.attention_types import TIME_UNIT, AttentionArguments
from slipstream.ops.kernel_call import apply

BLOCK = 32
UNIT = tl.constexpr(TIME_UNIT)


@triton.jit
def _decay(decay_ptr, q_time, k_time):
    """Of the gaps u of a tile: exp(-b u^c), u^c (0 where u is 0) and ln u (finite where u is 0)."""
    dt = tl.abs(q_time[:, None] - k_time[None, :])
    log = tl.log(tl.maximum(dt, 1).to(tl.float32) / UNIT)
    power = tl.where(dt > 0, tl.exp(tl.load(decay_ptr + 2) * log), 0.0)
    return tl.exp(-tl.load(decay_ptr + 1) * power), power, log


@triton.jit
def _add_decay_gradient(grad_ptr, decay_ptr, q_time, k_time, grad):
    """Add what the gradient of a tile's time bias is for a, b and c."""
    decay, power, log = _decay(decay_ptr, q_time, k_time)
    a, b = tl.load(decay_ptr), tl.load(decay_ptr + 1)
    slope = grad * decay
    tl.atomic_add(grad_ptr, tl.sum(slope))
    slope = -a * slope * power
    tl.atomic_add(grad_ptr + 1, tl.sum(slope))
    tl.atomic_add(grad_ptr + 2, b * tl.sum(slope * log))


@triton.jit
def _biases(
    position_ptr, time_ptr, borders_ptr, q_time, k_time, apart, reach, time_entries,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """Position and time bias of a tile, with the table entries they came from."""
    place = tl.minimum(tl.maximum(apart, 1 - reach), reach - 1) + reach - 1
    bucket = tl.zeros_like(apart)
    position = apart.to(tl.float32) * 0
    time = position
    if HAS_POSITION:
        position = tl.load(position_ptr + place)
    if HAS_TIME and SEARCH == 0:
        time, _, _ = _decay(time_ptr, q_time, k_time)
        time = tl.load(time_ptr) * time
    if HAS_TIME and SEARCH > 0:
        dt = tl.abs(q_time[:, None] - k_time[None, :])
        for i in tl.static_range(SEARCH):
            further = bucket + (1 << (SEARCH - 1 - i))
            inside = further < time_entries
            border = tl.load(borders_ptr + further, mask=inside, other=0)
            bucket = tl.where(inside & (border <= dt), further, bucket)
        time = tl.load(time_ptr + bucket)
    return position, time, place, bucket


@triton.jit
def _geometry(q_index, k_index, q_len, k_len, candidates, window, HAS_WINDOW: tl.constexpr):
    """Which pairs see each other, and how many positions they stand apart."""
    history = k_len - candidates
    own = k_len - q_len + q_index
    real = (q_index < q_len)[:, None] & (k_index < k_len)[None, :]
    apart = tl.minimum(own, history)[:, None] - tl.minimum(k_index, history)[None, :]
    seen = ((k_index[None, :] < history) & (k_index[None, :] <= own[:, None])) | (
        k_index[None, :] == own[:, None]
    )
    if HAS_WINDOW:
        seen = seen & (apart < window)
    return seen & real, apart


@triton.jit
def _tile(
    q, k, q_time, k_time, rows, keys, q_len, k_len, candidates, window, scale,
    position_ptr, time_ptr, borders_ptr, reach, time_entries, SEARCH: tl.constexpr,
    CHANNELS: tl.constexpr, HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Mask and scores of a tile, its biases, and the table entries these came from."""
    seen, apart = _geometry(rows, keys, q_len, k_len, candidates, window, HAS_WINDOW)
    position, time, place, bucket = _biases(
        position_ptr, time_ptr, borders_ptr, q_time, k_time, apart, reach, time_entries,
        HAS_POSITION, HAS_TIME, SEARCH,
    )  # fmt: skip
    score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if CHANNELS == 1:
        score += position + time
    return seen, score, position, time, place, bucket


@triton.jit
def _score_gradient(grad_out, v, seen, score):
    """The gradient of a tile's scores, and the sigmoid of the scores."""
    gate = tl.sigmoid(score)
    grad = tl.dot(grad_out, tl.trans(v), input_precision="ieee") * gate * (1 + score * (1 - gate))
    return tl.where(seen, grad, 0.0), gate


@triton.jit
def _rows(ptr, first, index, length, head, stride, width, PADDED: tl.constexpr):
    """Load rows first + index of one head as [index, PADDED], zero past sequence and width."""
    column = tl.arange(0, PADDED)
    at = (first + index)[:, None] * stride + head * width + column[None, :]
    return tl.load(ptr + at, mask=(index < length)[:, None] & (column < width)[None, :], other=0.0)


@triton.jit
def _store_rows(ptr, first, index, length, head, stride, width, value, PADDED: tl.constexpr):
    """Store [index, PADDED] as rows first + index of one head."""
    column = tl.arange(0, PADDED)
    at = (first + index)[:, None] * stride + head * width + column[None, :]
    tl.store(ptr + at, value, mask=(index < length)[:, None] & (column < width)[None, :])


@triton.jit
def _sequence(q_offsets_ptr, k_offsets_ptr, candidates_ptr, HAS_CANDIDATES: tl.constexpr):
    """Where the program's sequence begins, and its number of queries, keys and candidates."""
    b = tl.program_id(1)
    q0 = tl.load(q_offsets_ptr + b)
    k0 = tl.load(k_offsets_ptr + b)
    q_len = tl.load(q_offsets_ptr + b + 1) - q0
    k_len = tl.load(k_offsets_ptr + b + 1) - k0
    candidates = k_len * 0
    if HAS_CANDIDATES:
        candidates = tl.load(candidates_ptr + b)
    return q0, k0, q_len, k_len, candidates


@triton.jit
def _times(ptr, first, index, length, HAS_TIME: tl.constexpr):
    """Timestamps first + index, zero past the sequence."""
    times = index.to(tl.int64) * 0
    if HAS_TIME:
        times = tl.load(ptr + first + index, mask=index < length, other=0)
    return times


@triton.jit
def _keys(
    k_ptr, v_ptr, times_ptr, first, index, length, head, heads, key_width, value_width,
    HAS_TIME: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Keys, values and timestamps first + index of one head."""
    k = _rows(k_ptr, first, index, length, head, heads * key_width, key_width, K)
    v = _rows(v_ptr, first, index, length, head, heads * value_width, value_width, V)
    return k, v, _times(times_ptr, first, index, length, HAS_TIME)


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, q_offsets_ptr, k_offsets_ptr, candidates_ptr,
    position_ptr, time_ptr, borders_ptr, q_times_ptr, k_times_ptr,
    out_ptr, heads, key_width, value_width, reach, time_entries, window, scale, inverse_divisor,
    K: tl.constexpr, V: tl.constexpr, N: tl.constexpr, SEARCH: tl.constexpr, CHANNELS: tl.constexpr,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, HAS_CANDIDATES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Outputs of one block of queries and one head."""
    head = tl.program_id(2)
    q0, k0, q_len, k_len, candidates = _sequence(
        q_offsets_ptr, k_offsets_ptr, candidates_ptr, HAS_CANDIDATES
    )
    rows = tl.program_id(0) * N + tl.arange(0, N)
    if tl.program_id(0) * N < q_len:
        q = _rows(q_ptr, q0, rows, q_len, head, heads * key_width, key_width, K)
        q_time = _times(q_times_ptr, q0, rows, q_len, HAS_TIME)
        end = tl.minimum(k_len, k_len - q_len + (tl.program_id(0) + 1) * N)
        out = tl.zeros((N, V), dtype=tl.float32)
        by_time = tl.zeros((N, V), dtype=tl.float32)
        by_position = tl.zeros((N, V), dtype=tl.float32)
        for start in range(0, end, N):
            keys = start + tl.arange(0, N)
            k, v, k_time = _keys(
                k_ptr, v_ptr, k_times_ptr, k0, keys, k_len, head, heads, key_width, value_width,
                HAS_TIME, K, V,
            )  # fmt: skip
            seen, score, position, time, _, _ = _tile(
                q, k, q_time, k_time, rows, keys, q_len, k_len, candidates, window, scale,
                position_ptr, time_ptr, borders_ptr, reach, time_entries, SEARCH, CHANNELS,
                HAS_POSITION, HAS_TIME, HAS_WINDOW,
            )  # fmt: skip
            if CHANNELS == 3:
                by_time += tl.dot(tl.where(seen, time, 0.0), v, input_precision="ieee")
                by_position += tl.dot(tl.where(seen, position, 0.0), v, input_precision="ieee")
            weight = tl.where(seen, score * tl.sigmoid(score), 0.0)
            out += tl.dot(weight, v, input_precision="ieee")
        stride = CHANNELS * heads * value_width
        _store_rows(out_ptr, q0, rows, q_len, head, stride, value_width, out * inverse_divisor, V)
        if CHANNELS == 3:
            at = out_ptr + heads * value_width
            _store_rows(at, q0, rows, q_len, head, stride, value_width, by_time, V)
            at = out_ptr + 2 * heads * value_width
            _store_rows(at, q0, rows, q_len, head, stride, value_width, by_position, V)


@triton.jit
def backward_queries_kernel(
    q_ptr, k_ptr, v_ptr, q_offsets_ptr, k_offsets_ptr, candidates_ptr,
    position_ptr, time_ptr, borders_ptr, q_times_ptr, k_times_ptr,
    grad_out_ptr, grad_q_ptr, grad_position_ptr, grad_time_ptr,
    heads, key_width, value_width, reach, time_entries, window, scale, inverse_divisor,
    K: tl.constexpr, V: tl.constexpr, N: tl.constexpr, SEARCH: tl.constexpr, CHANNELS: tl.constexpr,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, HAS_CANDIDATES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Gradients of one block of queries and one head, and of the bias tables."""
    head = tl.program_id(2)
    q0, k0, q_len, k_len, candidates = _sequence(
        q_offsets_ptr, k_offsets_ptr, candidates_ptr, HAS_CANDIDATES
    )
    stride, channel = CHANNELS * heads * value_width, heads * value_width
    rows = tl.program_id(0) * N + tl.arange(0, N)
    if tl.program_id(0) * N < q_len:
        q = _rows(q_ptr, q0, rows, q_len, head, heads * key_width, key_width, K)
        q_time = _times(q_times_ptr, q0, rows, q_len, HAS_TIME)
        grad_out = (
            _rows(grad_out_ptr, q0, rows, q_len, head, stride, value_width, V) * inverse_divisor
        )
        grad_q = tl.zeros((N, K), dtype=tl.float32)
        # Every sequence and head adds to tables of its own: less contention, and shorter sums.
        share = tl.program_id(1) * heads + head
        end = tl.minimum(k_len, k_len - q_len + (tl.program_id(0) + 1) * N)
        for start in range(0, end, N):
            keys = start + tl.arange(0, N)
            k, v, k_time = _keys(
                k_ptr, v_ptr, k_times_ptr, k0, keys, k_len, head, heads, key_width, value_width,
                HAS_TIME, K, V,
            )  # fmt: skip
            seen, score, _, _, place, bucket = _tile(
                q, k, q_time, k_time, rows, keys, q_len, k_len, candidates, window, scale,
                position_ptr, time_ptr, borders_ptr, reach, time_entries, SEARCH, CHANNELS,
                HAS_POSITION, HAS_TIME, HAS_WINDOW,
            )  # fmt: skip
            grad, _ = _score_gradient(grad_out, v, seen, score)
            grad_q += tl.dot(grad, k, input_precision="ieee")
            if HAS_TIME:
                by_time = grad
                if CHANNELS == 3:
                    second = _rows(
                        grad_out_ptr + channel, q0, rows, q_len, head, stride, value_width, V
                    )
                    by_time = tl.dot(second, tl.trans(v), input_precision="ieee")
                at = grad_time_ptr + share * time_entries
                if SEARCH == 0:
                    by_time = tl.where(seen, by_time, 0.0)
                    _add_decay_gradient(at, time_ptr, q_time, k_time, by_time)
                else:
                    tl.atomic_add(at + bucket, by_time, mask=seen)
            if HAS_POSITION:
                by_position = grad
                if CHANNELS == 3:
                    third = _rows(
                        grad_out_ptr + 2 * channel, q0, rows, q_len, head, stride, value_width, V
                    )
                    by_position = tl.dot(third, tl.trans(v), input_precision="ieee")
                tl.atomic_add(
                    grad_position_ptr + share * (2 * reach - 1) + place, by_position, mask=seen
                )
        _store_rows(
            grad_q_ptr, q0, rows, q_len, head, heads * key_width, key_width, grad_q * scale, K
        )


@triton.jit
def backward_keys_kernel(
    q_ptr, k_ptr, v_ptr, q_offsets_ptr, k_offsets_ptr, candidates_ptr,
    position_ptr, time_ptr, borders_ptr, q_times_ptr, k_times_ptr,
    grad_out_ptr, grad_k_ptr, grad_v_ptr,
    heads, key_width, value_width, reach, time_entries, window, scale, inverse_divisor,
    K: tl.constexpr, V: tl.constexpr, N: tl.constexpr, SEARCH: tl.constexpr, CHANNELS: tl.constexpr,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, HAS_CANDIDATES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Gradients of one block of keys and values and one head."""
    stride, channel = CHANNELS * heads * value_width, heads * value_width
    q0, k0, q_len, k_len, candidates = _sequence(
        q_offsets_ptr, k_offsets_ptr, candidates_ptr, HAS_CANDIDATES
    )
    head = tl.program_id(2)
    keys = tl.program_id(0) * N + tl.arange(0, N)
    if tl.program_id(0) * N < k_len:
        k, v, k_time = _keys(
            k_ptr, v_ptr, k_times_ptr, k0, keys, k_len, head, heads, key_width, value_width,
            HAS_TIME, K, V,
        )  # fmt: skip
        grad_k = tl.zeros((N, K), dtype=tl.float32)
        grad_v = tl.zeros((N, V), dtype=tl.float32)
        first = tl.maximum(0, tl.program_id(0) * N - (k_len - q_len)) // N * N
        for start in range(first, q_len, N):
            rows = start + tl.arange(0, N)
            q = _rows(q_ptr, q0, rows, q_len, head, heads * key_width, key_width, K)
            q_time = _times(q_times_ptr, q0, rows, q_len, HAS_TIME)
            grad_out = (
                _rows(grad_out_ptr, q0, rows, q_len, head, stride, value_width, V) * inverse_divisor
            )
            seen, score, position, time, _, _ = _tile(
                q, k, q_time, k_time, rows, keys, q_len, k_len, candidates, window, scale,
                position_ptr, time_ptr, borders_ptr, reach, time_entries, SEARCH, CHANNELS,
                HAS_POSITION, HAS_TIME, HAS_WINDOW,
            )  # fmt: skip
            grad, gate = _score_gradient(grad_out, v, seen, score)
            weight = tl.where(seen, score * gate, 0.0)
            grad_k += tl.dot(tl.trans(grad), q, input_precision="ieee")
            grad_v += tl.dot(tl.trans(weight), grad_out, input_precision="ieee")
            if CHANNELS == 3:
                second = _rows(
                    grad_out_ptr + channel, q0, rows, q_len, head, stride, value_width, V
                )
                third = _rows(
                    grad_out_ptr + 2 * channel, q0, rows, q_len, head, stride, value_width, V
                )
                grad_v += tl.dot(
                    tl.trans(tl.where(seen, time, 0.0)), second, input_precision="ieee"
                )
                grad_v += tl.dot(
                    tl.trans(tl.where(seen, position, 0.0)), third, input_precision="ieee"
                )
        _store_rows(
            grad_k_ptr, k0, keys, k_len, head, heads * key_width, key_width, grad_k * scale, K
        )
        _store_rows(grad_v_ptr, k0, keys, k_len, head, heads * value_width, value_width, grad_v, V)


def _time(a: AttentionArguments) -> torch.Tensor | None:
    """The time table, or a, b and c of the function, or None."""
    return a.time_W if a.decay_3 is None else a.decay_3


def _launch(
    kernel: Any,
    a: AttentionArguments,
    channels: int,
    offsets_B1: torch.Tensor,
    outputs: list[torch.Tensor],
) -> None:
    """Run a kernel over the blocks of every sequence and head.

    An absent tensor is replaced by q, which is then never read.
    """
    sequences, heads = a.q_offsets_B1.numel() - 1, a.q_THK.shape[1]
    if not sequences:
        return
    blocks = triton.cdiv(max(1, int(offsets_B1.diff().max())), BLOCK)
    inputs = (
        a.q_THK, a.k_SHK, a.v_SHV, a.q_offsets_B1, a.k_offsets_B1, a.num_candidates_B,
        a.position_P, _time(a), a.borders_W, a.timestamps_T, a.k_timestamps_S,
    )  # fmt: skip
    tensors = [(a.q_THK if x is None else x).contiguous() for x in inputs]
    time = _time(a)
    entries = 0 if time is None else time.numel()
    kernel[(blocks, sequences, heads)](
        *tensors,
        *outputs,
        heads,
        a.q_THK.shape[2],
        a.v_SHV.shape[2],
        1 if a.position_P is None else (a.position_P.numel() + 1) // 2,
        entries,
        a.window or 0,
        a.scale,
        1.0 / a.divisor,
        K=max(16, triton.next_power_of_2(a.q_THK.shape[2])),
        V=max(16, triton.next_power_of_2(a.v_SHV.shape[2])),
        N=BLOCK,
        SEARCH=0 if a.decay_3 is not None else max(1, entries.bit_length()),
        CHANNELS=channels,
        HAS_POSITION=a.position_P is not None,
        HAS_TIME=time is not None,
        HAS_CANDIDATES=a.num_candidates_B is not None,
        HAS_WINDOW=a.window is not None,
    )


class _TritonAttention(torch.autograd.Function):
    """One call of the operator; `leaves` are the tensors that gradients reach."""

    @staticmethod
    def forward(
        ctx: Any, a: AttentionArguments, channels: int, *leaves: torch.Tensor | None
    ) -> torch.Tensor:
        out = a.q_THK.new_empty(a.output_shape(channels))
        _launch(forward_kernel, a, channels, a.q_offsets_B1, [out])
        ctx.save_for_backward(*leaves)
        ctx.arguments, ctx.channels = a, channels
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        a: AttentionArguments = ctx.arguments
        _ = ctx.saved_tensors  # raises if an input was changed in place since the forward pass
        grad_out = grad_out.contiguous()
        grad_q, grad_k, grad_v = (
            torch.empty_like(x, memory_format=torch.contiguous_format)
            for x in (a.q_THK, a.k_SHK, a.v_SHV)
        )
        shares = (a.q_offsets_B1.numel() - 1) * a.q_THK.shape[1]
        tables = [
            None if x is None else x.new_zeros(shares, x.numel()) for x in (a.position_P, _time(a))
        ]
        placed = [grad_q if x is None else x for x in tables]
        _launch(
            backward_queries_kernel, a, ctx.channels, a.q_offsets_B1, [grad_out, grad_q, *placed]
        )
        _launch(backward_keys_kernel, a, ctx.channels, a.k_offsets_B1, [grad_out, grad_k, grad_v])
        position, time = (None if x is None else x.sum(0) for x in tables)
        by_kind = (None, time) if a.decay_3 is not None else (time, None)
        return (None, None, grad_q, grad_k, grad_v, position, *by_kind)


def attention(a: AttentionArguments, *, fuxi: bool) -> torch.Tensor:
    """HSTU's attention, or with `fuxi` FuXi's three channels, by the Triton kernels (fp32)."""
    if a.q_THK.dtype != torch.float32:
        raise TypeError(f"back-end 'triton' needs fp32 tensors, got {a.q_THK.dtype}")
    return apply(_TritonAttention, a, 3 if fuxi else 1, *a.leaves)
