"""Pretrained vectors reach the token, are not trained, and are served as they were trained."""

import numpy as np
import polars as pl
import pytest
import torch

from slipstream import api
from slipstream.api.questions import stored_history
from slipstream.data import append_log
from slipstream.errors import SlipstreamError
from slipstream.serving.engine.engine import Engine
from slipstream.training.recommendation import recommend, score
from slipstream.training.recommender import Recommender
from slipstream.training.run import open_run, train
from tests.support.training_fixtures import same_tensors, small_recipe

RANKING = {"task": "ranking", "tasks": {"like": {"column": "like"}}, "loss": {"kind": "bce"}}


def make_store(out, dtype=np.float32, missing=()):
    rng = np.random.default_rng(5)
    frame = pl.DataFrame(
        {
            "user_id": rng.integers(0, 12, 150),
            "item_id": rng.integers(100, 120, 150),
            "timestamp": np.arange(150),
            "like": rng.integers(0, 2, 150),
        }
    )
    ids = np.array([each for each in range(100, 120) if each not in missing])
    matrix = rng.normal(size=(ids.size, 5)).astype(dtype)
    return api.prepare(frame, out, actions="like", item_vectors={"text": (ids, matrix)})


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("task", ["retrieval", "ranking"])
def test_what_is_trained_is_served(tmp_path, task, dtype):
    store = make_store(tmp_path / "store", dtype, missing=(103,))
    before = store.item_vectors["text"].copy()
    recipe = small_recipe(item_vectors=["text"], **(RANKING if task == "ranking" else {}))
    train(recipe, store, tmp_path / "run", quiet=True)
    assert np.array_equal(store.item_vectors["text"], before)
    run = api.load(tmp_path / "run")
    run.export(tmp_path / "bundle")
    engine = Engine(tmp_path / "bundle")
    *_, made = open_run(tmp_path / "run")
    weight = made.model.state_dict()["projections.layers.0.weight"]
    started = Recommender.build(recipe, store).model.state_dict()["projections.layers.0.weight"]
    assert weight.shape == (8, 5) and not torch.equal(weight, started)
    for user, expected in enumerate(recommend(made, store, range(6), 4)):
        history = stored_history(store, user, store.items)
        recent = history.part(max(0, len(history) - 8), len(history))
        items, scores = engine.retrieve(recent, 4, exclude=history.items)
        assert items == [store.items.id(row) for row in expected.items]
        assert scores == pytest.approx(expected.scores, abs=1e-6)


def test_a_vector_moves_the_token_and_a_missing_one_does_not(tmp_path):
    store = make_store(tmp_path / "store", missing=(103,))
    made = Recommender.build(small_recipe(item_vectors=["text"], **RANKING), store)
    candidates = np.arange(store.num_items)

    def scores():
        return np.array(score(made, store, [2], candidates)["like"]).ravel()

    with_vectors = scores()
    with torch.no_grad():
        made.model.projections.layers[0].weight.zero_()
    assert np.abs(with_vectors - scores()).min() > 0  # a history with vectors moves every score


@pytest.mark.parametrize("schedule", ["dual_buffer", "nested"])
def test_schedules_train_alike(tmp_path, schedule):
    store = make_store(tmp_path / "store")
    for name, options in (("plain", "synchronous"), ("other", schedule)):
        options = {"schedule": options, "micro_batches": 1}
        train(
            small_recipe(item_vectors=["text"], train=options), store, tmp_path / name, quiet=True
        )
    plain, other = (open_run(tmp_path / name)[2] for name in ("plain", "other"))
    assert same_tensors(plain.model.state_dict(), other.model.state_dict())
    assert torch.equal(plain.tables.all_rows("item"), other.tables.all_rows("item"))


def test_a_run_goes_on_over_a_grown_store(tmp_path):
    store = make_store(tmp_path / "store")
    recipe = small_recipe(item_vectors=["text"])
    train(recipe, store, tmp_path / "run", quiet=True)
    later = {"user_id": [1, 2], "item_id": [200, 201], "timestamp": [500, 501], "like": [1, 0]}
    new = (np.array([200]), np.ones((1, 5), dtype=np.float32))
    grown = append_log(store.directory, pl.DataFrame(later), item_vectors={"text": new}).store
    longer = small_recipe(item_vectors=["text"], train={"epochs": 3})
    train(longer, grown, tmp_path / "run", quiet=True)
    *_, made = open_run(tmp_path / "run")
    assert made.features.item_vectors["text"][grown.items.row(200)].tolist() == [1.0] * 5
    assert not made.features.item_vectors["text"][grown.items.row(201)].any()


def test_vectors_that_the_store_lacks_are_refused(tmp_path):
    store = make_store(tmp_path / "store")
    with pytest.raises(SlipstreamError, match="no item vectors 'texts'; did you mean 'text'"):
        Recommender.build(small_recipe(item_vectors=["texts"]), store)
