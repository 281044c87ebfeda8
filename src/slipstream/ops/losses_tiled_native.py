"""Softmax losses against many columns at once (shared negatives, whole catalogue), in tiles.

Shared negatives: the matrix products are torch's (BLAS); one compiled pass over each tile of tokens
does scaling, masking, exponentials and sums. All tiles use one buffer and backward computes them
again, so tokens x columns is never in memory. Whole catalogue: one compiled call gives the losses
and the gradients of a loss that weighs all tokens alike, as training does; any other weights are
computed as for shared negatives. Touch this together with native/losses_tile.cpp and
native/losses_full.cpp.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from slipstream.ops.kernel_call import apply, kernel
from slipstream.ops.losses_types import SoftmaxInputs
from slipstream.ops.rows_native import check_count, scatter_rows

# 4 MB of logits: large enough for the matrix product, small enough for the cache.
_TILE_VALUES = 1 << 20


@dataclass(frozen=True)
class _Columns:
    """The rows that tokens are scored with; shared negatives have ids and log-probabilities."""

    rows_CD: torch.Tensor
    ids_C: torch.Tensor | None
    log_q_C: torch.Tensor | None
    temperature: float

    def tiles(self, hidden_TD: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """(tokens, raw logits of these tokens) over one reused buffer."""
        columns = len(self.rows_CD)
        step = max(1, min(len(hidden_TD), _TILE_VALUES // max(columns, 1)))
        buffer = hidden_TD.new_empty(step * columns)
        for start in range(0, len(hidden_TD), step):
            piece_TD = hidden_TD[start : start + step]
            logits = buffer[: len(piece_TD) * columns].view(len(piece_TD), columns)
            torch.mm(piece_TD, self.rows_CD.T, out=logits)
            yield slice(start, start + len(piece_TD)), logits


def _forward(
    hidden_TD: torch.Tensor, columns: _Columns, targets_T: torch.Tensor, own_T: torch.Tensor | None
) -> list[torch.Tensor]:
    """[loss_T, sums_T2]."""
    loss_T, sums_T2 = hidden_TD.new_empty(len(hidden_TD)), hidden_TD.new_empty(len(hidden_TD), 2)
    call = kernel("ss_softmax_tile_forward")
    for at, logits in columns.tiles(hidden_TD):
        own = None if own_T is None else own_T[at]
        call(
            logits, *logits.shape, 1.0 / columns.temperature, targets_T[at], columns.ids_C,
            columns.log_q_C, own, loss_T[at], sums_T2[at],
        )  # fmt: skip
    return [loss_T, sums_T2]


def _backward(
    hidden_TD: torch.Tensor,
    columns: _Columns,
    targets_T: torch.Tensor,
    sums_T2: torch.Tensor,
    grad_T: torch.Tensor,
    own_grad_T: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(d hidden, d rows); fills own_grad_T, the gradient of targets that are no columns."""
    grad_hidden_TD, grad_rows_CD = torch.empty_like(hidden_TD), torch.zeros_like(columns.rows_CD)
    call = kernel("ss_softmax_tile_backward")
    for at, logits in columns.tiles(hidden_TD):
        own = None if own_grad_T is None else own_grad_T[at]
        call(
            logits, *logits.shape, 1.0 / columns.temperature, targets_T[at], columns.ids_C,
            columns.log_q_C, sums_T2[at], grad_T[at], own,
        )  # fmt: skip
        torch.mm(logits, columns.rows_CD, out=grad_hidden_TD[at])
        grad_rows_CD.addmm_(logits.T, hidden_TD[at])
    return grad_hidden_TD, grad_rows_CD


class _FullSoftmax(torch.autograd.Function):
    """Every row of the catalogue is a column."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: torch.Tensor,
        rows_ND: torch.Tensor,
        targets_T: torch.Tensor,
        temperature: float,
    ) -> torch.Tensor:
        hidden_TD, rows_ND = hidden_TD.contiguous(), rows_ND.contiguous()
        small_T = targets_T.to(torch.int32).contiguous()
        check_count(len(rows_ND), "rows")
        loss_T = hidden_TD.new_empty(len(hidden_TD))
        wanted = any(ctx.needs_input_grad)
        unit_TD, unit_ND = (torch.empty_like(x) if wanted else None for x in (hidden_TD, rows_ND))
        failed = kernel("ss_full_softmax")(
            hidden_TD, rows_ND, small_T, len(hidden_TD), len(rows_ND), hidden_TD.shape[1],
            1.0 / temperature, loss_T, unit_TD, unit_ND,
        )  # fmt: skip
        if failed:
            raise MemoryError("a softmax over the catalogue could not get its scratch memory")
        ctx.save_for_backward(hidden_TD, rows_ND, small_T, unit_TD, unit_ND)
        ctx.temperature = temperature
        return loss_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_TD, rows_ND, small_T, unit_TD, unit_ND = ctx.saved_tensors
        if not len(grad_T) or bool((grad_T == grad_T[0]).all()):
            weight = grad_T[0] if len(grad_T) else 1.0
            return unit_TD * weight, unit_ND * weight, None, None
        columns = _Columns(rows_ND, None, None, ctx.temperature)
        _, sums_T2 = _forward(hidden_TD, columns, small_T, None)
        return (
            *_backward(hidden_TD, columns, small_T, sums_T2, grad_T.contiguous(), None),
            None,
            None,
        )


class _SharedSoftmax(torch.autograd.Function):
    """The shared negatives are the columns; each token's target is scored on its own."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden_TD: torch.Tensor,
        rows_UD: torch.Tensor,
        inputs: SoftmaxInputs,
    ) -> torch.Tensor:
        targets_T, negatives_R, temperature = inputs.targets_T, inputs.negatives, inputs.temperature
        hidden_TD, small_T = hidden_TD.contiguous(), targets_T.to(torch.int32).contiguous()
        ids_R, log_q_R = negatives_R.to(torch.int32).contiguous(), inputs.negative_log_q
        log_q_R = None if log_q_R is None else log_q_R.contiguous()
        check_count(len(rows_UD), "rows")
        columns = _Columns(rows_UD.index_select(0, negatives_R), ids_R, log_q_R, temperature)
        target_TD = rows_UD.index_select(0, targets_T)
        own_T = torch.linalg.vecdot(hidden_TD, target_TD) / temperature
        own_T = own_T if inputs.target_log_q_T is None else own_T - inputs.target_log_q_T
        loss_T, sums_T2 = _forward(hidden_TD, columns, small_T, own_T.contiguous())
        saved = (
            hidden_TD, columns.rows_CD, target_TD, small_T, targets_T, negatives_R, ids_R, sums_T2,
        )  # fmt: skip
        ctx.save_for_backward(*saved, *(() if log_q_R is None else (log_q_R,)))
        ctx.temperature, ctx.num_rows = temperature, len(rows_UD)  # type: ignore[attr-defined]
        return loss_T

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_T: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors  # type: ignore[attr-defined]
        hidden_TD, rows_RD, target_TD, small_T, targets_T, negatives_R, ids_R, sums_T2, *rest = (
            saved
        )
        columns = _Columns(rows_RD, ids_R, rest[0] if rest else None, ctx.temperature)  # type: ignore[attr-defined]
        own_grad_T = torch.empty_like(grad_T, memory_format=torch.contiguous_format)
        grad_hidden_TD, grad_rows_RD = _backward(
            hidden_TD, columns, small_T, sums_T2, grad_T.contiguous(), own_grad_T
        )
        grad_hidden_TD.addcmul_(own_grad_T.unsqueeze(1), target_TD)
        grad_rows_UD = scatter_rows(hidden_TD, targets_T, own_grad_T, ctx.num_rows)  # type: ignore[attr-defined]
        scatter_rows(grad_rows_RD, negatives_R, None, len(grad_rows_UD), into_UD=grad_rows_UD)
        return grad_hidden_TD, grad_rows_UD, None


def full_softmax_loss(
    hidden_TD: torch.Tensor, rows_ND: torch.Tensor, targets_T: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Each token against the whole catalogue."""
    return apply(_FullSoftmax, hidden_TD, rows_ND, targets_T, temperature)


def shared_softmax_loss(inputs: SoftmaxInputs) -> torch.Tensor:
    """All tokens against one set of negatives."""
    return apply(_SharedSoftmax, inputs.hidden_TD, inputs.rows_UD, inputs)
