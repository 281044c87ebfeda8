"""Exact top-k search over a catalogue: the best rows of a query by dot product, ties by row.

A score is the dot product in fp64, rounded to fp32, so it does not depend on how the search is
done. A first pass scores every row roughly (8-bit codes where a catalogue was quantised, fp32
otherwise) and knows how far off it can be; only rows that may be among the best are scored exactly.
Rows whose length already says that they cannot be among them are not looked at. The result is that
of brute force. Rows may lie in a memory-mapped file: the first pass of a quantised catalogue does
not read them. A server searches in steps (`search_steps`) between which it may do something more
urgent. Many queries at once are answered in one pass over tiles of rows (tiled_search.py). Touch
this when the catalogue is searched in another way.
"""

import math
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

import torch

from slipstream.ops import native
from slipstream.ops.kernel_call import kernel
from slipstream.ops.row_readers import RowReader, TensorRows

QUANTIZED_FROM = 50_000  # rows from which a catalogue is searched by 8-bit codes first
BLOCK = 1_024  # rows that share a bound of their norms, as in native/topk.cpp
SEARCH_TILE = 256 * BLOCK  # rows whose codes are searched in one step
_QUERY_LEVELS = 8_191  # a query's values as whole numbers: 32 bits hold the sum of 2,000 products
ROUNDING = 1e-5  # share of |query| |row| that fp32 arithmetic may be off, for widths up to 2,000
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


def quantize_rows(rows: torch.Tensor | RowReader) -> QuantizedRows:
    """Make the 8-bit codes of rows (fp32, perhaps memory-mapped), tile by tile."""
    rows = TensorRows(rows) if isinstance(rows, torch.Tensor) else rows
    count, width = rows.shape
    if width > MAX_WIDTH:
        raise ValueError(f"rows of more than {MAX_WIDTH} values are not quantised, got {width}")
    codes_NS = torch.zeros(count, code_width(width), dtype=torch.int8)
    scales_N, errors_N, norms_N = (torch.zeros(count) for _ in range(3))
    for begin, rows_CD in rows.tiles():
        part = slice(begin, begin + len(rows_CD))
        made = (codes_NS[part], scales_N[part], errors_N[part], norms_N[part])
        quantize_tile(rows_CD, *made)
    return QuantizedRows(codes_NS, scales_N, errors_N, norms_N, block_maxima(norms_N))


def code_width(width: int) -> int:
    """Return the bytes of a row's codes: a multiple of 64."""
    return -(-width // 64) * 64


def block_maxima(norms_N: torch.Tensor) -> torch.Tensor:
    """Return the largest norm of each block of rows."""
    blocks = [part.max() for part in norms_N.split(BLOCK)]
    return torch.stack(blocks) if blocks else norms_N


def quantize_tile(
    rows_ND: torch.Tensor,
    codes_NS: torch.Tensor,
    scales_N: torch.Tensor,
    errors_N: torch.Tensor,
    norms_N: torch.Tensor,
) -> None:
    """Fill the codes and bounds of one tile."""
    rows_ND = rows_ND.contiguous()
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


@dataclass(frozen=True)
class SearchLimits:
    """Which rows a search may return, and what is added to their scores."""

    excluded: torch.Tensor = field(
        default_factory=lambda: torch.empty(0, dtype=torch.int64)
    )  # rows
    allowed_N: torch.Tensor | None = None  # bool; rows where it is False are left out
    boosts_N: torch.Tensor | None = None  # fp32, added to the scores before they are compared

    def __post_init__(self) -> None:
        object.__setattr__(self, "excluded", self.excluded.unique())

    def boost(self, scores_C: torch.Tensor, rows_C: torch.Tensor) -> torch.Tensor:
        """Return the scores of rows by which they are compared."""
        return scores_C if self.boosts_N is None else scores_C + self.boosts_N[rows_C]


def top_k(
    query_D: torch.Tensor,
    rows: torch.Tensor | RowReader,
    k: int,
    *,
    quantized: QuantizedRows | None = None,
    excluded: torch.Tensor | None = None,
    allowed_N: torch.Tensor | None = None,
    boosts_N: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores and rows of the `k` best rows, best first, equal scores by row.

    For `excluded`, `allowed_N` and `boosts_N` see `SearchLimits`; fewer than `k` come back where
    they leave fewer.
    """
    nothing = torch.empty(0, dtype=torch.int64)
    limits = SearchLimits(nothing if excluded is None else excluded, allowed_N, boosts_N)
    steps = search_steps(query_D, rows, k, quantized=quantized, limits=limits)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: tuple[torch.Tensor, torch.Tensor] = end.value
            return found


def search_steps(
    query_D: torch.Tensor,
    rows: torch.Tensor | RowReader,
    k: int,
    *,
    quantized: QuantizedRows | None = None,
    limits: SearchLimits | None = None,
    tile: int = SEARCH_TILE,
) -> Generator[None, None, tuple[torch.Tensor, torch.Tensor]]:
    """Search as `top_k` does, yielding between tiles of rows; the generator's value is the result.

    `tile` rows are searched by their codes in one step; it is a multiple of `BLOCK`.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    rows = TensorRows(rows) if isinstance(rows, torch.Tensor) else rows
    limits = limits or SearchLimits()
    candidates = _Candidates(k)
    if quantized is not None and native.available():
        coded = _CodedSearch(query_D, quantized, k, limits)
        for begin in range(0, rows.shape[0], tile):
            end = min(begin + tile, rows.shape[0])
            candidates.add(*coded.search(begin, end, candidates.threshold))
            yield
    else:
        for part in _rough_candidates(rough_scores(query_D, rows), limits):
            candidates.add(*part)
            yield
    rows_C = candidates.rows.sort().values
    scores_C = limits.boost(score_rows(query_D, rows.take(rows_C)), rows_C)
    order = torch.sort(scores_C, descending=True, stable=True).indices[:k]
    return scores_C[order], rows_C[order]


def rough_scores(
    query_D: torch.Tensor, rows: RowReader
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield (first row, rough scores, how far off each may be) of every tile of rows."""
    norm = float(query_D.norm())
    for begin, rows_CD in rows.tiles():
        yield begin, rows_CD @ query_D, rows_CD.norm(dim=1) * (norm * ROUNDING)


_Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # rows, lowest and highest scores


class _Candidates:
    """The rows of the tiles searched so far that may be among the k best."""

    def __init__(self, k: int) -> None:
        self._k = k
        self._lowest, self._highest = torch.empty(0), torch.empty(0)
        self.rows = torch.empty(0, dtype=torch.int64)
        self.threshold = -math.inf  # the k-th best score is at least this

    def add(self, rows_C: torch.Tensor, lowest_C: torch.Tensor, highest_C: torch.Tensor) -> None:
        """Add the candidates of a tile, and drop those that can no longer win."""
        self.rows = torch.cat([self.rows, rows_C])
        self._lowest = torch.cat([self._lowest, lowest_C])
        self._highest = torch.cat([self._highest, highest_C])
        if self.rows.numel() > self._k:
            self.threshold = float(self._lowest.topk(self._k).values[-1])
            may_win = self._highest >= self.threshold
            self.rows = self.rows[may_win]
            self._lowest, self._highest = self._lowest[may_win], self._highest[may_win]


def _rough_candidates(
    tiles: Iterator[tuple[int, torch.Tensor, torch.Tensor]], limits: SearchLimits
) -> Iterator[_Part]:
    """Yield the rows of every tile that the limits leave, with the bounds of their scores."""
    for begin, scores_C, unsure_C in tiles:
        end = begin + scores_C.numel()
        kept_C = torch.ones(scores_C.numel(), dtype=torch.bool)
        if limits.allowed_N is not None:
            kept_C &= limits.allowed_N[begin:end]
        mine = (limits.excluded >= begin) & (limits.excluded < end)
        kept_C[limits.excluded[mine] - begin] = False
        rows_C = torch.arange(begin, end)[kept_C]
        lowest_C, highest_C = (scores_C - unsure_C)[kept_C], (scores_C + unsure_C)[kept_C]
        yield rows_C, limits.boost(lowest_C, rows_C), limits.boost(highest_C, rows_C)


class _CodedSearch:
    """One query against the codes of a catalogue, a tile of rows at a time."""

    def __init__(
        self, query_D: torch.Tensor, quantized: QuantizedRows, k: int, limits: SearchLimits
    ) -> None:
        self._quantized, self._k, self._limits = quantized, k, limits
        stride = quantized.codes_NS.shape[1]
        largest = float(query_D.abs().max()) if query_D.numel() else 0.0
        scale = largest / _QUERY_LEVELS if largest > 0 else 1.0
        codes_S = torch.zeros(stride, dtype=torch.int16)
        codes_S[: query_D.numel()] = (query_D / scale).round().to(torch.int16)
        left_D = query_D.double() - scale * codes_S[: query_D.numel()].double()
        norm = float(query_D.double().norm())
        # What the query's rounding takes from a score, and what fp32 arithmetic may add.
        error = float(left_D.norm()) * 1.0001 + norm * ROUNDING
        self._query = (codes_S, scale, math.nextafter(norm * 1.0001, math.inf), error)
        allowed_N, boosts_N = limits.allowed_N, limits.boosts_N
        self._allowed_N = None if allowed_N is None else allowed_N.to(torch.uint8)
        self._most_boost = 0.0 if boosts_N is None else float(boosts_N.max())

    def search(self, begin: int, end: int, threshold: float) -> _Part:
        """Return the rows of a tile that may be among the k best, with the bounds of scores."""
        codes, limits = self._quantized, self._limits
        room = min(end - begin, 16 * self._k + 4_096)
        while True:
            rows_C = torch.empty(room, dtype=torch.int64)
            lowest_C, highest_C = torch.empty(room), torch.empty(room)
            total = kernel("ss_search_codes")(
                *self._query,
                *(codes.codes_NS, codes.scales_N, codes.errors_N, codes.norms_N),
                *(codes.block_norms, begin, end, codes.codes_NS.shape[1]),
                *(min(self._k, codes.codes_NS.shape[0]), threshold),
                *(limits.excluded, limits.excluded.numel(), self._allowed_N),
                *(limits.boosts_N, self._most_boost, rows_C, lowest_C, highest_C, room),
            )
            if total <= room:
                return rows_C[:total], lowest_C[:total], highest_C[:total]
            room = total
