"""Exact top-k search over a catalogue: the best rows of a query by dot product, ties by row.

A score is the dot product in fp64, rounded to fp32, so it does not depend on how the search is
done. A first pass scores every row roughly (8-bit codes where a catalogue was quantised, fp32
otherwise) and knows how far off it can be; only rows that may be among the best are scored exactly.
The result is that of brute force. Rows may lie in a memory-mapped file: the first pass of a
quantised catalogue does not read them. Touch this when the catalogue is searched in another way.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from slipstream.ops import native
from slipstream.ops.kernel_call import kernel

TILE = 65_536  # rows scored at once where there are no codes
BLOCK = 1_024  # rows that share a bound of their norms, as in native/topk.cpp
_QUERY_LEVELS = 8_191  # a query's values as whole numbers: 32 bits hold the sum of 2,000 products
_ROUNDING = 1e-5  # share of |query| |row| that fp32 arithmetic may be off, for widths up to 2,000
MAX_WIDTH = 2_000


@dataclass(frozen=True)
class QuantizedRows:
    """8-bit codes of a catalogue's rows, with what bounds their error."""

    codes_NS: torch.Tensor  # int8, rows padded to a multiple of 64
    scales_N: torch.Tensor
    errors_N: torch.Tensor  # length of what rounding took from each row
    norms_N: torch.Tensor
    block_norms: torch.Tensor  # largest norm of each block of BLOCK rows

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the codes and bounds take."""
        parts = (self.codes_NS, self.scales_N, self.errors_N, self.norms_N, self.block_norms)
        return sum(part.nbytes for part in parts)


def quantize_rows(rows_ND: torch.Tensor) -> QuantizedRows:
    """Make the 8-bit codes of rows (fp32, perhaps memory-mapped), tile by tile."""
    count, width = rows_ND.shape
    if width > MAX_WIDTH:
        raise ValueError(f"rows of more than {MAX_WIDTH} values are not quantised, got {width}")
    stride = -(-width // 64) * 64
    codes_NS = torch.zeros(count, stride, dtype=torch.int8)
    scales_N, errors_N, norms_N = (torch.zeros(count) for _ in range(3))
    for begin in range(0, count, TILE):
        part = slice(begin, min(begin + TILE, count))
        made = (codes_NS[part], scales_N[part], errors_N[part], norms_N[part])
        _quantize_tile(rows_ND[part].contiguous(), *made)
    blocks = [part.max() for part in norms_N.split(BLOCK)]
    return QuantizedRows(
        codes_NS, scales_N, errors_N, norms_N, torch.stack(blocks) if blocks else norms_N
    )


def _quantize_tile(
    rows_ND: torch.Tensor,
    codes_NS: torch.Tensor,
    scales_N: torch.Tensor,
    errors_N: torch.Tensor,
    norms_N: torch.Tensor,
) -> None:
    """Fill the codes and bounds of one tile."""
    count, width = rows_ND.shape
    if native.available() and rows_ND.dtype == torch.float32:
        sizes = (count, width, codes_NS.shape[1])
        kernel("ss_quantize_rows")(rows_ND, *sizes, codes_NS, scales_N, errors_N, norms_N)
        return
    largest_N = rows_ND.abs().amax(dim=1) if width else torch.zeros(count)
    scales_N.copy_(largest_N / 127)
    inverse_N = torch.where(largest_N > 0, 127 / largest_N, 0.0)
    codes_ND = (rows_ND * inverse_N.unsqueeze(1)).round()
    codes_NS[:, :width] = codes_ND.to(torch.int8)
    left_ND = rows_ND.double() - scales_N.double().unsqueeze(1) * codes_ND.double()
    errors_N.copy_(left_ND.norm(dim=1) * 1.0001)
    norms_N.copy_(rows_ND.double().norm(dim=1) * 1.0001)


def score_rows(query_D: torch.Tensor, rows_CD: torch.Tensor) -> torch.Tensor:
    """Return the exact scores: dot products in fp64, rounded to fp32."""
    return (rows_CD.double() @ query_D.double()).float()


def top_k(
    query_D: torch.Tensor,
    rows_ND: torch.Tensor,
    k: int,
    *,
    quantized: QuantizedRows | None = None,
    excluded: torch.Tensor | None = None,
    allowed_N: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores and rows of the `k` best rows, best first, equal scores by row.

    Rows in `excluded` (int64) and rows where `allowed_N` (bool) is False are left out; fewer than
    `k` come back where fewer are left.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    none = torch.empty(0, dtype=torch.int64)
    excluded = none if excluded is None else excluded.unique()
    if quantized is not None and native.available():
        rows_C = _coded_candidates(query_D, quantized, k, excluded, allowed_N)
    else:
        tiles = rough_scores(query_D, rows_ND)
        rows_C = _rough_candidates(tiles, k, excluded, allowed_N)
    scores_C = score_rows(query_D, rows_ND[rows_C])
    order = torch.sort(scores_C, descending=True, stable=True).indices[:k]
    return scores_C[order], rows_C[order]


def rough_scores(
    query_D: torch.Tensor, rows_ND: torch.Tensor
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield (first row, rough scores, how far off each may be) of every tile of rows."""
    norm = float(query_D.norm())
    for begin in range(0, len(rows_ND), TILE):
        tile = rows_ND[begin : begin + TILE]
        yield begin, tile @ query_D, tile.norm(dim=1) * (norm * _ROUNDING)


def _rough_candidates(
    tiles: Iterator[tuple[int, torch.Tensor, torch.Tensor]],
    k: int,
    excluded: torch.Tensor,
    allowed_N: torch.Tensor | None,
) -> torch.Tensor:
    """Return the rows that may be among the k best, ascending."""
    lowest, highest, rows = torch.empty(0), torch.empty(0), torch.empty(0, dtype=torch.int64)
    for begin, scores_C, unsure_C in tiles:
        rows_C = torch.arange(begin, begin + scores_C.numel())
        kept_C = torch.ones(scores_C.numel(), dtype=torch.bool)
        if allowed_N is not None:
            kept_C &= allowed_N[begin : begin + scores_C.numel()]
        mine = (excluded >= begin) & (excluded < begin + scores_C.numel())
        kept_C[excluded[mine] - begin] = False
        lowest = torch.cat([lowest, (scores_C - unsure_C)[kept_C]])
        highest = torch.cat([highest, (scores_C + unsure_C)[kept_C]])
        rows = torch.cat([rows, rows_C[kept_C]])
        if rows.numel() > k:
            may_win = highest >= lowest.topk(k).values[-1]
            lowest, highest, rows = lowest[may_win], highest[may_win], rows[may_win]
    return rows


def _coded_candidates(
    query_D: torch.Tensor,
    quantized: QuantizedRows,
    k: int,
    excluded: torch.Tensor,
    allowed_N: torch.Tensor | None,
) -> torch.Tensor:
    """Return the rows that may be among the k best by their codes, ascending."""
    count, stride = quantized.codes_NS.shape
    largest = float(query_D.abs().max()) if query_D.numel() else 0.0
    scale = largest / _QUERY_LEVELS if largest > 0 else 1.0
    codes_S = torch.zeros(stride, dtype=torch.int16)
    codes_S[: query_D.numel()] = (query_D / scale).round().to(torch.int16)
    left_D = query_D.double() - scale * codes_S[: query_D.numel()].double()
    norm = float(query_D.double().norm())
    # What the query's rounding takes from a score, and what fp32 arithmetic may add.
    error = float(left_D.norm()) * 1.0001 + norm * _ROUNDING
    search: Callable[..., int] = kernel("ss_top_candidates")
    allowed = None if allowed_N is None else allowed_N.to(torch.uint8)
    room = min(count, 16 * k + 4_096)
    while True:
        found_C = torch.empty(room, dtype=torch.int64)
        total = search(
            *(codes_S, scale, math.nextafter(norm * 1.0001, math.inf), error),
            *(quantized.codes_NS, quantized.scales_N, quantized.errors_N, quantized.norms_N),
            *(quantized.block_norms, count, stride, min(k, max(1, count))),
            *(excluded, excluded.numel(), allowed, found_C, room),
        )
        if total <= room:
            return found_C[:total].sort().values
        room = total
