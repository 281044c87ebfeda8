"""The requests that measure a server; tests/system/test_evaluate_as_served.py sends them."""

import numpy as np
import pyarrow as pa
import pytest

from slipstream.cli.as_served import HeldOutRequests, evaluate_as_served, exported_version
from slipstream.data.store import SequenceStore, write_store
from slipstream.errors import SlipstreamError
from slipstream.serving.http.messages import RecommendAnswer
from slipstream.training.export import export_recommender
from slipstream.training.held_out import held_out_behaviours
from slipstream.training.metrics import MISSED
from slipstream.training.recommender import Recommender
from tests.support.training_fixtures import codes, small_recipe


@pytest.fixture
def store(tmp_path):
    """Two users and five items with text ids."""
    directory = tmp_path / "store"
    directory.mkdir()
    items = pa.table({"id": pa.array(["a/1", "b", "c d", "e", "f"])})
    users = pa.table({"id": pa.array(["ann", "bob"]), "feature:age": codes(np.array([2, 1]), 3)})
    log = np.array([0, 1, 0, 2, 3, 1, 4, 0])
    times = np.arange(8) * 10
    clicks = {"click": np.arange(8, dtype=np.float32)}
    write_store(directory, np.array([0, 5, 8]), log, times, clicks, items, users, {})
    return SequenceStore.open(directory)


def requests_of(store, *, more=None, with_time=False):
    recipe = small_recipe(user_features=["age"])
    return HeldOutRequests(
        store, recipe, held_out_behaviours(store, recipe, "test"), more or {}, with_time
    )


def test_a_request_has_the_whole_history_before_the_held_out_item_in_original_ids(store):
    user, rest = requests_of(store, more={"keep_seen": True}).request(0)
    history = rest["history"]
    assert user == "ann" and history.items == ["a/1", "b", "a/1", "c d"]
    assert history.timestamps == [0, 10, 20, 30] and history.actions == {"click": [0, 1, 2, 3]}
    assert rest["features"] == {"age": 2} and rest["keep_seen"] and "request_time" not in rest
    assert requests_of(store, with_time=True).request(1)[1]["request_time"] == 70


def test_the_place_of_the_held_out_item_is_read_from_the_answer(store):
    def answer(*items):
        return RecommendAnswer(list(items), {}, "v", "i-0", "inline", False, 4)

    asks = requests_of(store)
    assert asks.items_above(0, answer("f", "e", "b")) == 1
    assert asks.items_above(0, answer("f", "b")) == MISSED


def test_the_version_is_that_of_an_exported_bundle(store, tmp_path):
    recommender = Recommender.build(small_recipe(), store)
    version = export_recommender(recommender, store, tmp_path / "bundle")
    assert exported_version(recommender, store) == version


def test_a_ranking_run_is_refused(store):
    ranking = {"task": "ranking", "tasks": {"click": {"column": "click"}}, "loss": {"kind": "bce"}}
    recipe = small_recipe(**ranking)
    with pytest.raises(SlipstreamError, match="needs a retrieval run"):
        evaluate_as_served("http://x", recipe, store, Recommender.build(recipe, store))
