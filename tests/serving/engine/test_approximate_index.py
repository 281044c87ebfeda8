"""An index finds most of the best rows, says how many, and scores them exactly."""

import pytest
import torch

from slipstream.ops.row_readers import TensorRows, normalize_rows
from slipstream.ops.topk import SearchLimits
from slipstream.serving.engine.approximate_index import FaissIndex
from slipstream.serving.engine.item_search import ItemSearch
from slipstream.serving.engine.passes import run_steps

pytest.importorskip("faiss")


def directions(count: int = 2_000, width: int = 24) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    centres = torch.randn(40, width, generator=generator)
    chosen = torch.randint(0, 40, (count,), generator=generator)
    return normalize_rows(centres[chosen] + 0.5 * torch.randn(count, width, generator=generator))


@pytest.mark.parametrize("kind", ["hnsw", "ivf"])
def test_most_of_the_best_are_found_and_excluded_ones_are_not(kind: str):
    rows_ND = directions()
    index = FaissIndex(kind, TensorRows(rows_ND))
    assert index.name == kind and 0.9 < index.recall <= 1.0
    exact = torch.topk(rows_ND @ rows_ND[5], 30).indices
    excluded = exact[:10]
    found = index.candidates(rows_ND[5], 20, SearchLimits(excluded))
    assert not torch.isin(found, excluded).any()
    assert int(torch.isin(exact[10:], found).sum()) >= 18


def test_a_search_uses_it_where_no_filter_asks_for_more():
    rows_ND = directions()
    search = ItemSearch.__new__(ItemSearch)
    search.rows, search.quantized = TensorRows(rows_ND), None
    search.index = FaissIndex("hnsw", search.rows)
    scores, rows = run_steps(search.best_steps(rows_ND[7], 10, SearchLimits()))
    assert search.index_for(SearchLimits()) is search.index
    assert torch.equal(scores, search.scores(rows_ND[7], rows)) and int(rows[0]) == 7
    odd = SearchLimits(allowed_N=torch.arange(len(rows_ND)) % 2 == 1)
    assert search.index_for(odd) is None
    _, filtered = run_steps(search.best_steps(rows_ND[7], 10, odd))
    assert bool((filtered % 2 == 1).all())
    assert search.index_for(SearchLimits(boosts_N=torch.zeros(len(rows_ND)))) is None
