"""Recommendations for one user: the best unseen items, by retrieval or by a ranking task."""

import pytest
import torch

from slipstream.training.recommendation import recommend, whole_log
from slipstream.training.recommender import Recommender
from tests.support.training_fixtures import small_recipe, small_store

RANKING = {"task": "ranking", "tasks": {"click": {"column": "click"}}, "loss": {"kind": "bce"}}
USER = 3


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("data") / "store", items=40)


def log_of(store, user):
    return store.items_N[store.offsets_U1[user] : store.offsets_U1[user + 1]].tolist()


def test_the_query_is_the_newest_part_of_the_whole_log(store):
    ours = Recommender.build(small_recipe(), store)
    batch = whole_log(ours, store, USER)
    assert batch.items_T.tolist() == log_of(store, USER)[-8:]
    assert batch.supervised_T.nonzero().flatten().tolist() == [batch.num_tokens - 1]


@pytest.mark.parametrize("changes", [{}, RANKING], ids=["retrieval", "ranking"])
def test_unseen_items_come_best_first_and_seen_ones_never(store, changes):
    ours = Recommender.build(small_recipe(**changes), store)
    answer = recommend(ours, store, USER, count=1000)
    assert set(answer.items) == set(range(store.num_items)) - set(log_of(store, USER))
    assert answer.scores == sorted(answer.scores, reverse=True)
    assert recommend(ours, store, USER, count=3).items == answer.items[:3]


def test_retrieval_scores_are_queries_times_catalogue(store):
    ours = Recommender.build(small_recipe(), store)
    answer = recommend(ours, store, USER, count=5)
    scores = (ours.queries_SD(whole_log(ours, store, USER)) @ ours.catalogue_ND().T)[0]
    assert torch.equal(scores[answer.items], torch.tensor(answer.scores))
