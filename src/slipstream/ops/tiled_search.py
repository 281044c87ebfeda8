"""Exact search of many queries in one pass over tiles of rows: the best rows, and places of rows.

Scores are those of topk.py: dot products in fp64, rounded to fp32. Pairs are scored roughly in
fp32, as many at a time as a processor's cache holds; only those whose rough score leaves the answer
open are scored exactly. So the answer does not depend on the size of the tiles, nor on where rows
are read from, and no more than a tile is ever held. Touch this when many queries are answered in
another way.
"""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from slipstream.ops.row_readers import RowTile
from slipstream.ops.topk import ROUNDING

ROWS_AT_ONCE, QUERIES_AT_ONCE = 1 << 13, 128  # pairs whose rough scores are held: a cache's worth
_EXACT_AT_ONCE = 1 << 14  # pairs that are scored exactly at once
NO_ROW = -1


class Pairs(NamedTuple):
    """Pairs of a query and a row."""

    queries_P: torch.Tensor  # int64, place of the query
    rows_P: torch.Tensor  # int64, number of the row


class TopRows(NamedTuple):
    """The best rows of each query, best first; behind the last one -inf and `NO_ROW`."""

    scores_SK: torch.Tensor
    rows_SK: torch.Tensor


class _Scored(NamedTuple):
    """Rough scores of some queries and some rows, in memory that the next ones use again."""

    queries: slice
    begin: int
    rows_CD: torch.Tensor
    rough_SC: torch.Tensor
    unsure_S: torch.Tensor  # how far off a query's scores may be


def score_pairs(queries_PD: torch.Tensor, rows_PD: torch.Tensor) -> torch.Tensor:
    """Return the exact score of each query and its row: the dot product in fp64, as fp32."""
    return (queries_PD.double() * rows_PD.double()).sum(-1).float()


def top_k_of_tiles(
    queries_SD: torch.Tensor,
    tiles: Iterable[RowTile],
    k: int,
    *,
    excluded: Pairs | None = None,
    allowed_N: torch.Tensor | None = None,
) -> TopRows:
    """Return the `k` best rows of every query, equal scores by row.

    Tiles ascend. Pairs in `excluded`, and rows where `allowed_N` (bool) is False, are left out.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    if len(queries_SD) == 1:
        left_out_P = None if excluded is None else excluded.rows_P
        return _top_k_of_one(queries_SD[0], tiles, k, left_out_P, allowed_N)
    best = TopRows(
        torch.full((len(queries_SD), k), -torch.inf),
        torch.full((len(queries_SD), k), NO_ROW, dtype=torch.int64),
    )
    excluded = _by_row(excluded)
    for part in _score_roughly(queries_SD, tiles):
        bars_S = best.scores_SK[part.queries, -1].to(part.rough_SC.dtype)
        maybe_SC = _marks_from(part, bars_S - part.unsure_S)
        open_A = torch.from_numpy(maybe_SC.any(1)).nonzero().squeeze(1)
        if not open_A.numel():
            continue
        part = _leave_out(_only(part, open_A), open_A, excluded, allowed_N)
        asked_A = part.queries.start + open_A
        kept = TopRows(best.scores_SK[asked_A], best.rows_SK[asked_A])
        places_P, columns_P = _may_win(part, bars_S[open_A], k).nonzero(as_tuple=True)
        scores_P = _exact_scores(queries_SD[asked_A], part.rows_CD, places_P, columns_P)
        merged = _merge(kept, places_P, part.begin + columns_P, scores_P)
        best.scores_SK[asked_A], best.rows_SK[asked_A] = merged
    return best


def _top_k_of_one(
    query_D: torch.Tensor,
    tiles: Iterable[RowTile],
    k: int,
    excluded_P: torch.Tensor | None,
    allowed_N: torch.Tensor | None,
) -> TopRows:
    """Return the `k` best rows of a single query with as few calls as can be."""
    scores_K, rows_K = torch.empty(0), torch.empty(0, dtype=torch.int64)
    length = float(query_D.norm()) * _rounding(len(query_D))
    for first, tile_CD in tiles:
        unsure = length * float(tile_CD.norm(dim=1).max()) if len(tile_CD) else 0.0
        _check_finite(math.isfinite(unsure))
        rough_C = torch.mv(tile_CD, query_D)
        if excluded_P is not None:
            inside_P = (excluded_P >= first) & (excluded_P < first + len(tile_CD))
            rough_C[excluded_P[inside_P] - first] = -torch.inf
        if allowed_N is not None:
            rough_C[~allowed_N[first : first + len(tile_CD)]] = -torch.inf
        least = float(scores_K[-1]) - unsure if len(scores_K) == k else -math.inf
        if len(tile_CD) > k:
            least = max(least, float(rough_C.topk(k).values[-1]) - 2 * unsure)
        columns_P = ((rough_C >= least) & (rough_C > -torch.inf)).nonzero().squeeze(1)
        scores = torch.cat([scores_K, score_pairs(query_D, tile_CD[columns_P])])
        rows = torch.cat([rows_K, first + columns_P])
        order = torch.sort(scores, descending=True, stable=True).indices[:k]  # ties: earlier rows
        scores_K, rows_K = scores[order], rows[order]
    missing = (0, k - len(rows_K))
    pad = torch.nn.functional.pad
    return TopRows(
        pad(scores_K, missing, value=-torch.inf)[None], pad(rows_K, missing, value=NO_ROW)[None]
    )


def count_rivals(
    queries_SD: torch.Tensor,
    tiles: Iterable[RowTile],
    targets_S: torch.Tensor,
    target_scores_S: torch.Tensor,
    excluded: Pairs | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Count the rows that score above each query's target, and those that tie (int64 [S] each).

    `target_scores_S` are the exact scores of the rows `targets_S`. The target itself and the pairs
    in `excluded` are not counted.
    """
    above_S, tied_S = (torch.zeros(len(queries_SD), dtype=torch.int64) for _ in range(2))

    def count(queries_P: torch.Tensor, scores_P: torch.Tensor, sign: int) -> None:
        bars_P, least = target_scores_S[queries_P], len(queries_SD)
        above_S.add_(torch.bincount(queries_P[scores_P > bars_P], minlength=least), alpha=sign)
        tied_S.add_(torch.bincount(queries_P[scores_P == bars_P], minlength=least), alpha=sign)

    targets = Pairs(torch.arange(len(queries_SD)), targets_S)
    left_out = _by_row(_distinct(targets, excluded))
    for part in _score_roughly(queries_SD, tiles):
        bars_S = target_scores_S[part.queries].to(part.rough_SC.dtype)
        low_S = bars_S - part.unsure_S
        high_S = (bars_S + part.unsure_S).nextafter(bars_S.new_tensor(torch.inf))  # surely above
        surely_SC, maybe_SC = _marks_from(part, high_S), _marks_from(part, low_S)
        above_S[part.queries] += _count_rows(surely_SC)
        places_P, columns_P = _find_marks(np.bitwise_xor(surely_SC, maybe_SC, out=maybe_SC))
        asked_P = part.queries.start + places_P
        scores_P = _exact_scores(queries_SD, part.rows_CD, asked_P, columns_P)
        count(asked_P, scores_P, 1)
        if not part.queries.start:  # once for all queries: take back what does not compete
            out = _within(left_out, part.begin, len(part.rows_CD))
            columns_P = out.rows_P - part.begin
            scores_P = _exact_scores(queries_SD, part.rows_CD, out.queries_P, columns_P)
            count(out.queries_P, scores_P, -1)
    return above_S, tied_S


def _score_roughly(queries_SD: torch.Tensor, tiles: Iterable[RowTile]) -> Iterator[_Scored]:
    """Yield the rough scores of all pairs, for as many at a time as a cache holds."""
    lengths_S, lasting = queries_SD.norm(dim=1) * _rounding(queries_SD.shape[1]), queries_SD[:0, 0]
    for first, tile_CD in tiles:
        for begin in range(0, len(tile_CD), ROWS_AT_ONCE):
            rows_CD = tile_CD[begin : begin + ROWS_AT_ONCE]
            unsure_S = lengths_S * rows_CD.norm(dim=1).max()
            _check_finite(bool(unsure_S.sum().isfinite()))
            for start in range(0, len(queries_SD), QUERIES_AT_ONCE):
                part = slice(start, min(start + QUERIES_AT_ONCE, len(queries_SD)))
                shape = (part.stop - start, len(rows_CD))
                if lasting.numel() < math.prod(shape):
                    lasting = queries_SD.new_empty(math.prod(shape))
                rough_SC = lasting[: math.prod(shape)].view(shape)
                torch.mm(queries_SD[part], rows_CD.T, out=rough_SC)
                yield _Scored(part, first + begin, rows_CD, rough_SC, unsure_S[part])


def _check_finite(is_finite: bool) -> None:
    if not is_finite:
        raise ValueError(
            "scores hold NaN or infinity: the model has diverged, lower the learning rate"
        )


def _rounding(width: int) -> float:
    """Return the share of |query| |row| that a rough score may be off.

    A sum of `width` products in fp32, in any order, is off by at most width / 2^24 of it; a few
    more roundings belong to the bars that scores are compared with.
    """
    return min(ROUNDING, 1.01 * (width + 8) * 2.0**-24)


def _marks_from(part: _Scored, least_S: torch.Tensor) -> np.ndarray:
    """Return which scores are not below their query's least one.

    numpy compares rows with a number each many times as fast as torch does.
    """
    marks_SC: np.ndarray = part.rough_SC.numpy() >= least_S.numpy()[:, None]
    return marks_SC


def _count_rows(marks_SC: np.ndarray) -> torch.Tensor:
    """Count the marks of each query (int64 [S])."""
    return torch.tensor([np.count_nonzero(marks_C) for marks_C in marks_SC])


def _find_marks(marks_SC: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the places and the columns of all marks."""
    found = np.divmod(np.flatnonzero(marks_SC), marks_SC.shape[1])
    return torch.from_numpy(found[0]), torch.from_numpy(found[1])


def _only(part: _Scored, chosen_A: torch.Tensor) -> _Scored:
    """Copy the scores of some of the queries."""
    return part._replace(rough_SC=part.rough_SC[chosen_A], unsure_S=part.unsure_S[chosen_A])


def _leave_out(
    part: _Scored, chosen_A: torch.Tensor, excluded: Pairs, allowed_N: torch.Tensor | None
) -> _Scored:
    """Set the scores of what must not be answered to -inf; `chosen_A` are the part's queries."""
    count = len(part.rows_CD)
    out = _within(excluded, part.begin, count)
    place_S = torch.full((part.queries.stop - part.queries.start,), NO_ROW)
    place_S[chosen_A] = torch.arange(len(chosen_A))
    inside_P = (out.queries_P >= part.queries.start) & (out.queries_P < part.queries.stop)
    places_P = place_S[out.queries_P[inside_P] - part.queries.start]
    columns_P, asked_P = out.rows_P[inside_P] - part.begin, places_P != NO_ROW
    part.rough_SC[places_P[asked_P], columns_P[asked_P]] = -torch.inf
    if allowed_N is not None:
        part.rough_SC[:, ~allowed_N[part.begin : part.begin + count]] = -torch.inf
    return part


def _may_win(part: _Scored, bars_S: torch.Tensor, k: int) -> torch.Tensor:
    """Return which pairs may be among the k best, given the k-th best score so far."""
    unsure_S1 = part.unsure_S.unsqueeze(1)
    highest_SC = part.rough_SC + unsure_S1
    may_win_SC = (highest_SC >= bars_S.unsqueeze(1)) & (part.rough_SC > -torch.inf)
    if part.rough_SC.shape[1] > k and int(may_win_SC.sum()) > 2 * k * len(bars_S):
        lowest_SC = part.rough_SC - unsure_S1
        may_win_SC &= highest_SC >= lowest_SC.topk(k).values[:, -1:]
    return may_win_SC


def _exact_scores(
    queries_SD: torch.Tensor, rows_CD: torch.Tensor, places_P: torch.Tensor, columns_P: torch.Tensor
) -> torch.Tensor:
    """Return the exact scores of pairs of a query and a row of the tile."""
    parts = [
        score_pairs(queries_SD[places], rows_CD[columns])
        for places, columns in zip(
            places_P.split(_EXACT_AT_ONCE), columns_P.split(_EXACT_AT_ONCE), strict=True
        )
    ]
    return torch.cat(parts)


def _merge(
    kept: TopRows, places_P: torch.Tensor, rows_P: torch.Tensor, scores_P: torch.Tensor
) -> TopRows:
    """Return the best of what is kept and of later rows, which come ascending for each query."""
    if not places_P.numel():
        return kept
    count, k = kept.rows_SK.shape
    filled_SK = kept.rows_SK != NO_ROW
    queries = torch.cat([filled_SK.nonzero()[:, 0], places_P])
    rows = torch.cat([kept.rows_SK[filled_SK], rows_P])
    scores = torch.cat([kept.scores_SK[filled_SK], scores_P])
    order = torch.sort(scores, descending=True, stable=True).indices  # equal scores: earlier rows
    order = order[torch.sort(queries[order], stable=True).indices]
    queries, rows, scores = queries[order], rows[order], scores[order]
    counts_S = torch.bincount(queries, minlength=count)
    column = torch.arange(queries.numel()) - (counts_S.cumsum(0) - counts_S)[queries]
    wins = column < k
    best = TopRows(
        torch.full_like(kept.scores_SK, -torch.inf), torch.full_like(kept.rows_SK, NO_ROW)
    )
    best.scores_SK[queries[wins], column[wins]] = scores[wins]
    best.rows_SK[queries[wins], column[wins]] = rows[wins]
    return best


def _distinct(targets: Pairs, more: Pairs | None) -> Pairs:
    """Return all pairs, each once."""
    if more is None:
        return targets
    pairs_2P = torch.stack([torch.cat(each) for each in zip(targets, more, strict=True)])
    return Pairs(*pairs_2P.unique(dim=1))


def _by_row(pairs: Pairs | None) -> Pairs:
    """Return the pairs in the order of their rows."""
    if pairs is None:
        nothing = torch.empty(0, dtype=torch.int64)
        return Pairs(nothing, nothing)
    order = pairs.rows_P.argsort()
    return Pairs(pairs.queries_P[order], pairs.rows_P[order])


def _within(pairs: Pairs, begin: int, count: int) -> Pairs:
    """Return the pairs, in the order of their rows, of `count` rows from `begin` on."""
    first, last = torch.searchsorted(pairs.rows_P, torch.tensor([begin, begin + count])).tolist()
    return Pairs(pairs.queries_P[first:last], pairs.rows_P[first:last])
