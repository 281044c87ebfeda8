"""Search by tiles finds what brute force over all rows finds, whatever the tiles are."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from slipstream.ops import tiled_search
from slipstream.ops.tiled_search import NO_ROW, Pairs, count_rivals, score_pairs, top_k_of_tiles
from tests.ops.test_topk import brute_force, catalogue


def cut(rows_ND, size):
    """All rows in tiles of `size`."""
    return ((begin, rows_ND[begin : begin + size]) for begin in range(0, len(rows_ND), size))


def problem(seed, spread=0.5, queries=9, count=400, width=20):
    """Queries, rows with duplicates, pairs to leave out (some of them twice)."""
    rows_ND, _ = catalogue(count, width, seed, spread)
    generator = torch.Generator().manual_seed(seed)
    queries_SD = torch.randn(queries, width, generator=generator)
    queries_SD[0] = 0  # every row ties
    excluded = Pairs(
        torch.randint(0, queries, (120,), generator=generator),
        torch.randint(0, count, (120,), generator=generator),
    )
    return queries_SD, rows_ND, excluded, generator


@given(
    seed=st.integers(0, 10_000),
    k=st.sampled_from([1, 7, 60, 500]),
    tile=st.sampled_from([1, 13, 128, 1_000]),
    spread=st.sampled_from([0.0, 3.0]),
    filtered=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_the_best_rows_of_every_query_are_those_of_brute_force(seed, k, tile, spread, filtered):
    queries_SD, rows_ND, excluded, generator = problem(seed, spread)
    allowed_N = torch.rand(len(rows_ND), generator=generator) < 0.3 if filtered else None
    best = top_k_of_tiles(queries_SD, cut(rows_ND, tile), k, excluded=excluded, allowed_N=allowed_N)
    for place, query_D in enumerate(queries_SD):
        out = excluded.rows_P[excluded.queries_P == place].tolist()
        scores_K, rows_K = brute_force(query_D, rows_ND, k, out, allowed_N)
        assert torch.equal(best.rows_SK[place, : len(rows_K)], rows_K)
        assert torch.equal(best.scores_SK[place, : len(rows_K)], scores_K)
        assert (best.rows_SK[place, len(rows_K) :] == NO_ROW).all()
        mine = Pairs(torch.zeros(len(out), dtype=torch.int64), torch.tensor(out, dtype=torch.int64))
        tiles = cut(rows_ND, tile)
        alone = top_k_of_tiles(query_D[None], tiles, k, excluded=mine, allowed_N=allowed_N)
        assert torch.equal(alone.rows_SK[0], best.rows_SK[place])
        assert torch.equal(alone.scores_SK[0], best.scores_SK[place])


def test_a_query_alone_is_scored_exactly_where_fp32_would_order_wrongly():
    """Rows whose dot products differ by less than fp32 sums round."""
    generator = torch.Generator().manual_seed(3)
    query_D = torch.randn(64, generator=generator)
    rows_ND = torch.randn(1, 64, generator=generator).repeat(300, 1)
    rows_ND += 1e-7 * torch.randn(300, 64, generator=generator)
    found = top_k_of_tiles(query_D[None], cut(rows_ND, 128), 5)
    scores_K, rows_K = brute_force(query_D, rows_ND, 5, [], None)
    assert torch.equal(found.rows_SK[0], rows_K) and torch.equal(found.scores_SK[0], scores_K)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tile", [1, 13, 1_000])
@pytest.mark.parametrize("seed", range(5))
def test_rivals_are_counted_as_over_all_rows_at_once(tile, seed, dtype, monkeypatch):
    queries_SD, rows_ND, excluded, generator = problem(seed)
    queries_SD, rows_ND = queries_SD.to(dtype), rows_ND.to(dtype)
    targets_S = torch.randint(0, len(rows_ND), (len(queries_SD),), generator=generator)
    targets_S[1] = len(rows_ND) // 3  # one of several rows that are alike
    target_scores_S = score_pairs(queries_SD, rows_ND[targets_S])
    monkeypatch.setattr(tiled_search, "ROWS_AT_ONCE", 50)
    monkeypatch.setattr(tiled_search, "QUERIES_AT_ONCE", 4)
    above_S, tied_S = count_rivals(
        queries_SD, cut(rows_ND, tile), targets_S, target_scores_S, excluded
    )
    for place, (query_D, target) in enumerate(zip(queries_SD, targets_S.tolist(), strict=True)):
        scores_N = (rows_ND.double() * query_D.double()).sum(1).float()
        rival_N = torch.ones(len(rows_ND), dtype=torch.bool)
        rival_N[target] = False
        rival_N[excluded.rows_P[excluded.queries_P == place]] = False
        assert above_S[place] == (scores_N[rival_N] > scores_N[target]).sum()
        assert tied_S[place] == (scores_N[rival_N] == scores_N[target]).sum()
    assert tied_S[0] > 100 and tied_S[1] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_later_tile_of_better_rows_replaces_all_that_was_kept(dtype):
    rows_ND = torch.arange(1.0, 3_001.0, dtype=dtype).unsqueeze(1)
    best = top_k_of_tiles(torch.ones(2, 1, dtype=dtype), cut(rows_ND, 1_000), 3)
    assert best.rows_SK.tolist() == [[2_999, 2_998, 2_997]] * 2


def test_what_cannot_be_searched_is_refused():
    with pytest.raises(ValueError, match="k must be at least 1"):
        top_k_of_tiles(torch.ones(1, 2), [], 0)
    with pytest.raises(ValueError, match="the model has diverged"):
        top_k_of_tiles(torch.full((1, 2), torch.nan), cut(torch.ones(3, 2), 2), 1)
