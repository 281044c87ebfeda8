"""Rows of a table by number, copied: torch's `index_select` with the next rows asked for ahead of their turn.

It copies bytes, so every dtype is served alike; there is nothing to differentiate (a lookup's leaf is what comes out).
"""

import torch

from slipstream.ops import backend as backends
from slipstream.ops import operand_checks
from slipstream.ops.kernel_call import kernel


@torch.no_grad()
def gather_rows(table_ND: torch.Tensor, rows_U: torch.Tensor, *, backend: str | None = None) -> torch.Tensor:
    """table_ND[rows_U]: a copy, in any order of rows, repeats allowed."""
    operand_checks.index("rows", rows_U, table_ND.shape[0], shape=(None,), device=table_ND.device)
    example = table_ND.new_empty(0, dtype=torch.float32)  # bytes have no precision to protect: any dtype is served alike
    if not table_ND.is_contiguous() or backends.choose(backend, example) != "native":
        return table_ND.index_select(0, rows_U)
    out_UD = table_ND.new_empty(rows_U.numel(), *table_ND.shape[1:])
    row_bytes = table_ND[:1].numel() * table_ND.element_size()
    kernel("ss_gather_rows", "ppnnp")(table_ND, rows_U.contiguous(), rows_U.numel(), row_bytes, out_UD)
    return out_UD
