"""Evaluation equals, query by query, what recommend answers just before the held-out item."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.training.evaluation import evaluate
from slipstream.training.held_out import held_out_behaviours
from slipstream.training.metrics import KS, MISSED, RankingMetrics
from slipstream.training.recommendation import recommend
from slipstream.training.recommender import Recommender
from tests.support.training_fixtures import small_recipe, small_store

MAX_LEN = 16


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Logs with repeats, up to 60 behaviours: many are longer than the window."""
    directory = tmp_path_factory.mktemp("data") / "store"
    return small_store(directory, users=40, items=60, mean_length=30)


def recommended(recommender, store, recipe, which, **more):
    """The metrics of the lists that `recommend` answers at the moments of the held-out items."""
    held_out = held_out_behaviours(store, recipe, which)
    moment = {"known": held_out.known_S.numpy(), "request_times": held_out.times_S.numpy()}
    answers = recommend(
        recommender, store, held_out.users_S.numpy(), store.num_items, **moment, **more
    )
    found = RankingMetrics()
    for answer, target in zip(answers, held_out.items_S.tolist(), strict=True):
        place = answer.items.index(target) if target in answer.items else MISSED
        found.add(torch.tensor([place]), torch.tensor([0]))
    return found.result()


@settings(max_examples=25, deadline=None)
@given(
    repeat=st.sampled_from(["exclude", "allow"]),
    window=st.sampled_from(["latest", "stepped"]),
    time_bias=st.sampled_from(["own", "next"]),
    which=st.sampled_from(["validation", "test"]),
    held_out=st.sampled_from([1, 3]),
    seed=st.integers(0, 2**20),
)
def test_what_is_measured_is_what_is_recommended(
    store, repeat, window, time_bias, which, held_out, seed
):
    recipe = small_recipe(
        seed=seed,
        repeat=repeat,
        window=window,
        split={"validation": held_out, "test": held_out},
        model={"max_len": MAX_LEN, "time_bias": time_bias},
        sampler={"max_len": MAX_LEN},
    )
    recommender = Recommender.build(recipe, store)
    figures = evaluate(recommender, store, recipe, which)
    assert figures["repeats"] > 0.1
    assert np.mean(store.lengths_U > MAX_LEN + 2) > 0.5
    found = recommended(recommender, store, recipe, which)
    for name in [f"{kind}@{k}" for kind in ("HR", "NDCG", "MRR") for k in KS]:
        assert figures[name] == pytest.approx(found[name], abs=1e-12), name


def test_the_check_can_fail(store):
    recipe = small_recipe(sampler={"max_len": 8})
    recommender = Recommender.build(recipe, store)
    figures = evaluate(recommender, store, recipe, "test")
    other = recommended(recommender, store, recipe, "test", repeat="allow")
    assert figures["HR@50"] < other["HR@50"]
