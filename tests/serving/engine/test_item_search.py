"""A bundle's catalogue is searched exactly: with codes or without, boosted, and for more."""

import numpy as np
import pytest
import torch

from slipstream.ops.topk import SearchLimits
from slipstream.serving.engine import item_search
from slipstream.serving.engine.item_search import ItemSearch
from slipstream.serving.engine.passes import run_steps
from tests.support.serving_samples import ITEMS, engine


@pytest.fixture(params=[1, 50_000], ids=["codes", "directions"])
def search(request, tmp_path, monkeypatch) -> ItemSearch:
    monkeypatch.setattr(item_search, "QUANTIZED_FROM", request.param)
    found = engine(tmp_path, task="retrieval").search
    assert found is not None and (found.quantized is not None) == (request.param == 1)
    return found


def query(seed=0):
    return torch.randn(32, generator=torch.Generator().manual_seed(seed))


def test_the_best_are_those_of_all_scores(search):
    every = torch.arange(ITEMS)
    scores = search.scores(query(), every)
    found, rows = run_steps(search.best_steps(query(), 25, SearchLimits()))
    assert rows.tolist() == np.argsort(-scores.numpy(), kind="stable")[:25].tolist()
    assert torch.equal(found, scores[rows])


def test_boosts_order_but_do_not_change_scores(search):
    boosts_N = torch.zeros(ITEMS)
    boosts_N[7] = 10.0
    found, rows = run_steps(search.best_steps(query(), 5, SearchLimits(boosts_N=boosts_N)))
    plain, others = run_steps(search.best_steps(query(), 5, SearchLimits()))
    assert rows.tolist() == [7, *others[others != 7][:4].tolist()]
    assert torch.equal(found, search.scores(query(), rows))
    assert plain.tolist() == sorted(plain.tolist(), reverse=True)


def test_a_search_goes_on_until_enough_is_found_or_nothing_is_left(search):
    asked = []

    def odd(rows_K):
        asked.append(rows_K.numel())
        return int((rows_K % 2).sum()) >= 20

    _, rows = run_steps(search.best_steps(query(), 5, SearchLimits(), odd))
    assert asked == [5, 20, 80] and rows.numel() == 80
    _, rows = run_steps(search.best_steps(query(), 5, SearchLimits(), lambda _rows: False))
    assert sorted(rows.tolist()) == list(range(ITEMS))
