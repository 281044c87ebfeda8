"""Random items without state: draw r of row t is a pure function of (seed, row id, r).

Uniform over `below` items, or by an alias table (Walker): the top 32 of 64 random bits choose a
column, the low 32 choose between the column's own item and its alias. All of it is integer
arithmetic, so both back-ends agree bit for bit. Touch this when negatives are drawn from another
distribution. The back-ends are short and stand here: plain PyTorch, and native/item_draws.cpp.
"""

import torch

from slipstream.ops import counter_random, native
from slipstream.ops.kernel_call import kernel

_DRAWN_AT_ONCE = 1 << 16  # numbers per chunk: the passes of the mixer then stay in cache
_LOW_32 = (1 << 32) - 1


def draw_items(
    seed: int,
    rows_T: torch.Tensor,
    count: int,
    below: int,
    *,
    threshold_N: torch.Tensor | None = None,
    alias_N: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """int64 [T, count] in [0, below): uniform, or by the alias table (thresholds 0 … 2^32)."""
    _check(rows_T, count, below, threshold_N, alias_N)
    if backend not in (None, "reference", "native"):
        raise ValueError(f"items are drawn by back-end reference or native, not '{backend}'")
    if backend == "native" or (
        backend is None and rows_T.device.type == "cpu" and native.available()
    ):
        items_TR = torch.empty(rows_T.numel(), count, dtype=torch.int64)
        rows_T = rows_T.contiguous()
        kernel("ss_draw_items")(
            seed, rows_T, rows_T.numel(), count, below, threshold_N, alias_N, items_TR
        )
        return items_TR
    items_TR = torch.empty(rows_T.numel(), count, dtype=torch.int64, device=rows_T.device)
    chunk = max(1, _DRAWN_AT_ONCE // count)
    for start in range(0, rows_T.numel(), chunk):
        part = slice(start, start + chunk)
        items_TR[part] = _pick(
            counter_random.random_bits(seed, rows_T[part], count), below, threshold_N, alias_N
        )
    return items_TR


def _pick(
    bits: torch.Tensor, below: int, threshold_N: torch.Tensor | None, alias_N: torch.Tensor | None
) -> torch.Tensor:
    column = (((bits >> 32) & _LOW_32) * below) >> 32
    if threshold_N is None or alias_N is None:
        return column
    return torch.where((bits & _LOW_32) < threshold_N[column], column, alias_N[column])


def _check(
    rows_T: torch.Tensor,
    count: int,
    below: int,
    threshold_N: torch.Tensor | None,
    alias_N: torch.Tensor | None,
) -> None:
    if rows_T.dtype != torch.int64 or rows_T.dim() != 1:
        raise TypeError(
            f"row ids must be a list of int64, got {rows_T.dtype} with {rows_T.dim()} dimensions"
        )
    if count < 1 or not 0 < below <= 1 << 31:
        raise ValueError(
            f"count must be at least 1 and below between 1 and 2^31, got {count} and {below}"
        )
    if (threshold_N is None) != (alias_N is None):
        raise ValueError(
            "an alias table is a threshold and an alias for every item: give both or neither"
        )
    for name, table in (("threshold", threshold_N), ("alias", alias_N)):
        if table is not None and (
            table.shape != (below,) or table.dtype != torch.int64 or not table.is_contiguous()
        ):
            raise ValueError(
                f"{name} must be {below} contiguous int64 numbers, got {tuple(table.shape)} of "
                f"{table.dtype}"
            )
