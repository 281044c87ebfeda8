"""Top-k search finds what brute force finds: the same rows, the same scores, ties by row."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from slipstream.ops import native, topk
from slipstream.ops.topk import (
    BLOCK,
    QuantizedRows,
    SearchLimits,
    quantize_rows,
    score_rows,
    search_steps,
    top_k,
)


def brute_force(query_D, rows_ND, k, excluded=(), allowed_N=None, boosts_N=None):
    """Every row scored exactly, then sorted."""
    scores_N = score_rows(query_D, rows_ND)
    scores_N = scores_N if boosts_N is None else scores_N + boosts_N
    kept = torch.ones(len(rows_ND), dtype=torch.bool) if allowed_N is None else allowed_N.clone()
    kept[list(excluded)] = False
    rows = kept.nonzero().squeeze(1)
    order = torch.sort(scores_N[rows], descending=True, stable=True).indices[:k]
    return scores_N[rows][order], rows[order]


def catalogue(count, width, seed=0, spread=1.0):
    """Rows of different lengths, some of them equal and some zero."""
    generator = torch.Generator().manual_seed(seed)
    rows_ND = torch.randn(count, width, generator=generator)
    rows_ND *= torch.exp(spread * torch.randn(count, 1, generator=generator))
    rows_ND[count // 3 : count // 3 + 3] = rows_ND[0]
    rows_ND[-1] = 0
    return rows_ND, torch.randn(width, generator=generator)


def same(found, expected):
    return all(torch.equal(left, right) for left, right in zip(found, expected, strict=True))


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("k", [1, 10, 300, 100_000])
@pytest.mark.parametrize(("count", "width"), [(50, 3), (5_000, 50), (3_000, 64), (2_000, 130)])
def test_the_best_rows_are_those_of_brute_force(coded, k, count, width):
    rows_ND, query_D = catalogue(count, width)
    quantized = quantize_rows(rows_ND) if coded else None
    found = top_k(query_D, rows_ND, k, quantized=quantized)
    assert same(found, brute_force(query_D, rows_ND, k))
    assert len(found[1]) == min(k, count)


@given(
    seed=st.integers(0, 10_000),
    k=st.integers(1, 60),
    coded=st.booleans(),
    filtered=st.booleans(),
    boosted=st.booleans(),
    spread=st.sampled_from([0.0, 0.5, 3.0]),
)
@settings(max_examples=60, deadline=None)
def test_excluded_forbidden_and_boosted_rows(seed, k, coded, filtered, boosted, spread):
    rows_ND, query_D = catalogue(700, 20, seed, spread)
    generator = torch.Generator().manual_seed(seed)
    excluded = torch.randint(0, 700, (90,), generator=generator)
    allowed_N = torch.rand(700, generator=generator) < 0.3 if filtered else None
    boosts_N = torch.randint(-2, 3, (700,), generator=generator).float() if boosted else None
    found = top_k(
        query_D,
        rows_ND,
        k,
        quantized=quantize_rows(rows_ND) if coded else None,
        excluded=excluded,
        allowed_N=allowed_N,
        boosts_N=boosts_N,
    )
    expected = brute_force(query_D, rows_ND, k, excluded.tolist(), allowed_N, boosts_N)
    assert same(found, expected)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_share_a_large_catalogue_and_find_the_same(threads):
    rows_ND, query_D = catalogue(40_000, 8)
    rows_ND = rows_ND[rows_ND.norm(dim=1).argsort()].contiguous()  # the best come last
    torch.set_num_threads(threads)
    found = top_k(query_D, rows_ND, 50, quantized=quantize_rows(rows_ND))
    assert same(found, brute_force(query_D, rows_ND, 50))


def test_rows_that_are_all_alike_come_back_in_their_order():
    rows_ND = torch.ones(3_000, 7)
    quantized = quantize_rows(rows_ND)
    for query_D in (torch.ones(7), -torch.ones(7), torch.zeros(7)):
        scores, rows = top_k(query_D, rows_ND, 20, quantized=quantized)
        assert rows.tolist() == list(range(20)) and scores.tolist() == [float(query_D.sum())] * 20


def test_the_bounds_of_the_codes_hold_in_both_back_ends(monkeypatch):
    rows_ND, query_D = catalogue(1_000, 33)
    coded: list[QuantizedRows] = [quantize_rows(rows_ND)]
    monkeypatch.setattr(native, "available", lambda: False)
    coded.append(quantize_rows(rows_ND))
    for each in coded:
        rough_N = each.scales_N.double() * (each.codes_NS[:, :33].double() @ query_D.double())
        off_N = (rough_N - rows_ND.double() @ query_D.double()).abs()
        assert bool((off_N <= each.errors_N * query_D.norm() * 1.0001).all())
        assert each.codes_NS.shape == (1_000, 64) and each.block_norms.shape == (1,)
    assert torch.equal(coded[0].codes_NS, coded[1].codes_NS)
    found = top_k(query_D, rows_ND, 9, quantized=coded[1])
    assert same(found, brute_force(query_D, rows_ND, 9))


def test_a_mapped_file_is_searched_without_being_read_whole(tmp_path):
    rows_ND, query_D = catalogue(2_000, 16)
    rows_ND.numpy().tofile(tmp_path / "rows")
    mapped_ND = torch.from_file(str(tmp_path / "rows"), size=rows_ND.numel()).view(2_000, 16)
    found = top_k(query_D, mapped_ND, 5, quantized=quantize_rows(mapped_ND))
    assert same(found, brute_force(query_D, rows_ND, 5))


@pytest.mark.parametrize("coded", [False, True])
def test_a_search_pauses_between_tiles_and_finds_the_same(coded, monkeypatch):
    monkeypatch.setattr("slipstream.ops.row_readers.TILE", 2 * BLOCK)
    rows_ND, query_D = catalogue(5 * BLOCK + 7, 16)
    steps = search_steps(
        query_D,
        rows_ND,
        30,
        quantized=quantize_rows(rows_ND) if coded else None,
        limits=SearchLimits(torch.tensor([3, 3, 9])),
        tile=2 * BLOCK,
    )
    pauses = 0
    try:
        while True:
            next(steps)
            pauses += 1
    except StopIteration as end:
        assert same(end.value, brute_force(query_D, rows_ND, 30, [3, 9]))
    assert pauses == 3


def test_rows_too_short_to_win_are_left_out_without_their_codes():
    rows_ND, query_D = catalogue(8 * BLOCK, 32, spread=0.0)
    rows_ND[BLOCK:] *= 1e-3  # only the first block can hold the best
    quantized = quantize_rows(rows_ND)
    quantized.codes_NS[BLOCK:] = 127  # wrong: whoever reads them finds other rows
    found = top_k(query_D, rows_ND, 20, quantized=quantized)
    assert same(found, brute_force(query_D, rows_ND, 20))
    quantized.codes_NS[:BLOCK] = 127
    assert not same(top_k(query_D, rows_ND, 20, quantized=quantized), found)


def test_what_cannot_be_searched_is_refused():
    with pytest.raises(ValueError, match="k must be at least 1"):
        top_k(torch.ones(2), torch.ones(3, 2), 0)
    with pytest.raises(ValueError, match="more than 2000 values"):
        quantize_rows(torch.ones(1, topk.MAX_WIDTH + 1))
