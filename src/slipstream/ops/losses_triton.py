"""Sampled softmax in Triton, for accelerators.

One program serves one token and reads its negatives in blocks, so tokens x negatives x width never
exists. The gradient of the rows needs no atomics: entries are sorted by row (stable) and one
program sums one row, so results repeat bit for bit. The kernels have run only in Triton's
interpreter on a CPU (TRITON_INTERPRET=1). Touch this when what the loss computes changes.
"""

# Kernel arguments are typed by Triton when a kernel is compiled.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from slipstream.ops.kernel_call import apply
from slipstream.ops.losses_types import SoftmaxInputs

_BLOCK_NEGATIVES = 32
_BLOCK_ENTRIES = 32


@triton.jit
def _gather(matrix, row, inside, width, BLOCK_D: tl.constexpr):
    """Rows of a matrix as [row, BLOCK_D], zero where not `inside` and past the width."""
    d = tl.arange(0, BLOCK_D)
    mask = inside[:, None] & (d < width)[None, :]
    return tl.load(matrix + row[:, None] * width + d[None, :], mask=mask, other=0.0)


@triton.jit
def _forward_kernel(
    hidden, rows, targets, negatives, target_log_q, negative_log_q, loss, logits, log_sum,
    num_negatives, width, inverse_temperature, HAS_TARGET_Q: tl.constexpr,
    HAS_NEGATIVE_Q: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Logits, log-sum-exp and loss of one token; sums are relative to the largest logit so far."""
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    in_width = d < width
    h = tl.load(hidden + t * width + d, mask=in_width, other=0.0)
    target = tl.load(targets + t)
    own = (
        tl.sum(h * tl.load(rows + target * width + d, mask=in_width, other=0.0), axis=0)
        * inverse_temperature
    )
    if HAS_TARGET_Q:
        own -= tl.load(target_log_q + t)
    largest = own
    total = own * 0.0 + 1.0
    for start in range(0, num_negatives, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        in_negatives = r < num_negatives
        negative = tl.load(negatives + t * num_negatives + r, mask=in_negatives, other=0)
        block = _gather(rows, negative, in_negatives, width, BLOCK_D)
        logit = tl.sum(block * h[None, :], axis=1) * inverse_temperature
        if HAS_NEGATIVE_Q:
            logit -= tl.load(negative_log_q + t * num_negatives + r, mask=in_negatives, other=0.0)
        logit = tl.where(in_negatives & (negative != target), logit, float("-inf"))
        tl.store(logits + t * num_negatives + r, logit, mask=in_negatives)
        new_largest = tl.maximum(largest, tl.max(logit, axis=0))
        total = total * tl.exp(largest - new_largest) + tl.sum(tl.exp(logit - new_largest), axis=0)
        largest = new_largest
    tl.store(log_sum + t, largest + tl.log(total))
    tl.store(loss + t, tl.log(total) + (largest - own))


@triton.jit
def _hidden_kernel(
    rows, targets, negatives, logits, log_sum, grad, weights, target_weights, grad_hidden,
    num_negatives, width, inverse_temperature, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """d loss / d logit of one token's negatives and target, and its hidden state's gradient."""
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    in_width = d < width
    scale = tl.load(grad + t) * inverse_temperature
    shift = tl.load(log_sum + t)
    others = scale * 0.0
    total = tl.zeros([BLOCK_D], dtype=tl.float32)
    for start in range(0, num_negatives, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        in_negatives = r < num_negatives
        negative = tl.load(negatives + t * num_negatives + r, mask=in_negatives, other=0)
        block = _gather(rows, negative, in_negatives, width, BLOCK_D)
        logit = tl.load(logits + t * num_negatives + r, mask=in_negatives, other=float("-inf"))
        weight = tl.exp(logit - shift) * scale
        tl.store(weights + t * num_negatives + r, weight, mask=in_negatives)
        others += tl.sum(weight, axis=0)
        total += tl.sum(block * weight[:, None], axis=0)
    target = tl.load(targets + t)
    total -= others * tl.load(rows + target * width + d, mask=in_width, other=0.0)
    tl.store(target_weights + t, -others)
    tl.store(grad_hidden + t * width + d, total, mask=in_width)


@triton.jit
def _rows_kernel(
    hidden, order, starts, weights, grad_rows, per_token, width,
    BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The gradient of one row: the sum over its entries, in the order they were sorted into."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    in_width = d < width
    begin = tl.load(starts + row)
    end = tl.load(starts + row + 1)
    total = tl.zeros([BLOCK_D], dtype=tl.float32)
    for start in range(begin, end, BLOCK_E):
        e = start + tl.arange(0, BLOCK_E)
        inside = e < end
        entry = tl.load(order + e, mask=inside, other=0)
        weight = tl.load(weights + entry, mask=inside, other=0.0)
        token = entry // per_token
        block = _gather(hidden, token, inside, width, BLOCK_D)
        total += tl.sum(block * weight[:, None], axis=0)
    tl.store(grad_rows + row * width + d, total, mask=in_width)


def _rows_gradient(
    hidden_TD: torch.Tensor, index_TE: torch.Tensor, weights_TE: torch.Tensor, num_rows: int
) -> torch.Tensor:
    """[num_rows, D]: weights[t, e] * hidden[t] summed by row."""
    sorted_rows, order = torch.sort(index_TE.flatten(), stable=True)
    starts = torch.searchsorted(sorted_rows, torch.arange(num_rows + 1, device=hidden_TD.device))
    grad_rows_UD = hidden_TD.new_empty(num_rows, hidden_TD.shape[1])
    if grad_rows_UD.numel():
        _rows_kernel[(num_rows,)](
            hidden_TD, order, starts, weights_TE, grad_rows_UD, index_TE.shape[1],
            hidden_TD.shape[1], BLOCK_E=_BLOCK_ENTRIES,
            BLOCK_D=triton.next_power_of_2(hidden_TD.shape[1]),
        )  # fmt: skip
    return grad_rows_UD


class _TritonSampledSoftmax(torch.autograd.Function):
    """Keeps logits (tokens x negatives); backward reads the rows once more."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TD: torch.Tensor, rows_UD: torch.Tensor, inputs: SoftmaxInputs
    ) -> torch.Tensor:
        hidden_TD, rows_UD = hidden_TD.contiguous(), rows_UD.contiguous()
        targets_T, negatives_TR = inputs.targets_T.contiguous(), inputs.negatives.contiguous()
        target_log_q_T, negative_log_q_TR = inputs.target_log_q_T, inputs.negative_log_q
        (tokens, width), negatives = hidden_TD.shape, negatives_TR.shape[1]
        loss_T, log_sum_T = hidden_TD.new_empty(tokens), hidden_TD.new_empty(tokens)
        logits_TR = hidden_TD.new_empty(tokens, negatives)
        if tokens:
            _forward_kernel[(tokens,)](
                hidden_TD, rows_UD, targets_T, negatives_TR,
                hidden_TD if target_log_q_T is None else target_log_q_T.contiguous(),
                hidden_TD if negative_log_q_TR is None else negative_log_q_TR.contiguous(),
                loss_T, logits_TR, log_sum_T, negatives, width, 1.0 / inputs.temperature,
                HAS_TARGET_Q=target_log_q_T is not None,
                HAS_NEGATIVE_Q=negative_log_q_TR is not None,
                BLOCK_R=_BLOCK_NEGATIVES, BLOCK_D=triton.next_power_of_2(max(width, 1)),
            )  # fmt: skip
        ctx.save_for_backward(hidden_TD, rows_UD, targets_T, negatives_TR, logits_TR, log_sum_T)
        ctx.temperature = inputs.temperature
        return loss_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_TD, rows_UD, targets_T, negatives_TR, logits_TR, log_sum_T = ctx.saved_tensors
        (tokens, width), negatives = hidden_TD.shape, negatives_TR.shape[1]
        weights_TR, target_weights_T = torch.empty_like(logits_TR), torch.empty_like(log_sum_T)
        grad_hidden_TD = torch.empty_like(hidden_TD)
        if tokens:
            _hidden_kernel[(tokens,)](
                rows_UD, targets_T, negatives_TR, logits_TR, log_sum_T, grad_T.contiguous(),
                weights_TR, target_weights_T, grad_hidden_TD, negatives, width,
                1.0 / ctx.temperature,
                BLOCK_R=_BLOCK_NEGATIVES, BLOCK_D=triton.next_power_of_2(max(width, 1)),
            )  # fmt: skip
        index_TE = torch.cat([targets_T.unsqueeze(1), negatives_TR], dim=1)
        weights_TE = torch.cat([target_weights_T.unsqueeze(1), weights_TR], dim=1)
        grad_rows_UD = _rows_gradient(hidden_TD, index_TE, weights_TE, rows_UD.shape[0])
        return grad_hidden_TD, grad_rows_UD, None


def sampled_softmax_loss(inputs: SoftmaxInputs) -> torch.Tensor:
    """Each token against its own negatives."""
    return apply(_TritonSampledSoftmax, inputs.hidden_TD, inputs.rows_UD, inputs)
