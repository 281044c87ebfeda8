"""The ranking contest: both contenders see the same impressions, and DIN is a peer that learns."""

import numpy as np
import pytest
import torch

from benchmarks.ranking import bench
from benchmarks.ranking.din import DIN, Impressions, evaluate, train_din
from slipstream import api
from slipstream.config import load_recipe
from slipstream.errors import SlipstreamError
from slipstream.training.recipe import Recipe


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    out = tmp_path_factory.mktemp("synthetic") / "store"
    return api.prepare("synthetic", out, synthetic=bench.QUICK_LOG, quiet=True)


@pytest.fixture(scope="module")
def recipe():
    return load_recipe(Recipe, bench.RECIPE, bench.QUICK)


def test_the_impressions_are_those_of_the_recipes_split(store, recipe):
    log = Impressions.of(store, recipe)
    rows = torch.cat(list(log.parts.values()))
    assert len(rows.unique()) == len(rows) == store.num_behaviours
    long_U = np.asarray(store.lengths_U) > 4
    assert len(log.parts["test"]) == len(log.parts["validation"]) == 2 * long_U.sum()
    last_U = np.asarray(store.offsets_U1[1:])[long_U] - 1
    assert set(last_U.tolist()) <= set(log.parts["test"].tolist())


def test_a_history_holds_the_users_own_earlier_impressions_only(store, recipe):
    log = Impressions.of(store, recipe)
    rows_S = log.parts["test"][:50]
    history_SL, known_SL = log.history_SL(rows_S, 5)
    assert history_SL.shape[1] == 5
    users_SL = log.users_N[history_SL]
    assert (users_SL == log.users_N[rows_S][:, None])[known_SL].all()
    assert (history_SL < rows_S[:, None])[known_SL].all()
    place_S = rows_S - log.starts_N[rows_S]
    assert torch.equal(known_SL.sum(1), place_S.clamp(max=5))


def test_impressions_after_a_row_do_not_change_its_score(store, recipe):
    torch.manual_seed(0)
    model, log = DIN(store, recipe).eval(), Impressions.of(store, recipe)
    row = log.parts["test"][:1]
    before = model(log, row)
    log.labels_NA[row] = 1 - log.labels_NA[row]
    log.items_N[row + 1] = 0
    assert torch.equal(model(log, row), before)


def test_din_learns(store, recipe):
    torch.manual_seed(1)
    tasks = list(recipe.tasks)
    untrained = evaluate(DIN(store, recipe), Impressions.of(store, recipe), "test", tasks)
    found = train_din(store, recipe, seed=1, epochs=8)
    assert found["test"]["AUC"] > untrained["AUC"] + 0.05
    assert found["test"]["behaviours"] == untrained["behaviours"]


@pytest.mark.system  # two processes
def test_the_command_compares_both_on_the_same_impressions(tmp_path):
    result = bench.run(quick=True, json_path=tmp_path / "ranking.json")
    ours, din = result["rows"]
    assert (ours["variant"], din["variant"]) == ("slipstream", "din")
    assert ours["samples"][0]["test"]["behaviours"] == din["samples"][0]["test"]["behaviours"]
    assert result["claims"]["auc"] == ours["AUC"] and result["claims"]["auc_din"] == din["AUC"]
    assert min(ours["peak_bytes"], din["peak_bytes"]) > 1 << 26


def test_missing_data_is_told_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_DATA", str(tmp_path))
    with pytest.raises(SlipstreamError, match="set SLIPSTREAM_DATA"):
        bench.make_store(False, tmp_path / "store")
