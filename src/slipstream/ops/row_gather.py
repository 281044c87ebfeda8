"""Copies rows of a table by number: torch's `index_select` with the next rows prefetched.

It copies bytes, so every dtype is served alike. It is not differentiable: the rows it returns are
the leaves of a step's graph. Touch this when tables read rows in another way. The back-ends are
short and stand here: plain PyTorch, and native/row_gather.cpp.
"""

import math

import torch

from slipstream.ops import backend as backends
from slipstream.ops import operand_checks
from slipstream.ops.kernel_call import kernel


@torch.no_grad()
def gather_rows(
    table_ND: torch.Tensor, rows_U: torch.Tensor, *, backend: str | None = None
) -> torch.Tensor:
    """table_ND[rows_U]: a copy, in any order of rows, repeats allowed."""
    return _gather(table_ND, rows_U, None, backend)[0]


@torch.no_grad()
def gather_present(
    table_ND: torch.Tensor, rows_U: torch.Tensor, present: torch.Tensor | None
) -> torch.Tensor | None:
    """`gather_rows`, or None where one of the rows is not marked in `present`.

    `present` is uint8 with a bit per row, lowest bit first; None marks all rows.
    """
    out_UD, absent = _gather(table_ND, rows_U, present, None)
    return None if absent else out_UD


def _gather(
    table_ND: torch.Tensor, rows_U: torch.Tensor, present: torch.Tensor | None, backend: str | None
) -> tuple[torch.Tensor, int]:
    """The rows, and how many are not present; row numbers are checked while copying."""
    operand_checks.integers("rows", rows_U, shape=(None,), device=table_ND.device)
    example = table_ND.new_empty(0, dtype=torch.float32)  # bytes are copied, whatever the dtype
    if not table_ND.is_contiguous() or backends.choose(backend, example) != "native":
        operand_checks.index(
            "rows", rows_U, table_ND.shape[0], shape=(None,), device=table_ND.device
        )
        marked_U = None if present is None else (present[rows_U >> 3] >> (rows_U & 7)) & 1
        absent = 0 if marked_U is None else int((marked_U == 0).sum())
        return table_ND.index_select(0, rows_U), absent
    out_UD = table_ND.new_empty(rows_U.numel(), *table_ND.shape[1:])
    row_bytes = math.prod(table_ND.shape[1:]) * table_ND.element_size()
    absent = kernel("ss_gather_rows")(
        table_ND, table_ND.shape[0], present, rows_U.contiguous(), rows_U.numel(), row_bytes, out_UD
    )
    if absent < 0:
        operand_checks.index(
            "rows", rows_U, table_ND.shape[0], shape=(None,), device=table_ND.device
        )
    return out_UD, absent
