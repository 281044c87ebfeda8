"""Recommendations, scores and vectors: many users at once, by retrieval or by a ranking task."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from slipstream.errors import SlipstreamError
from slipstream.history.user_history import History
from slipstream.training.recommendation import (
    GivenHistories,
    item_vectors,
    latest_behaviours,
    moments,
    recommend,
    recommend_user,
    score,
    similar_items,
    user_vectors,
)
from slipstream.training.recommender import Recommender
from tests.support.training_fixtures import small_recipe, small_store

RANKING = {"task": "ranking", "tasks": {"click": {"column": "click"}}, "loss": {"kind": "bce"}}
TASKS = pytest.mark.parametrize("changes", [{}, RANKING], ids=["retrieval", "ranking"])
NEXT = {"model": {"time_bias": "next"}}
USER = 3


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("data") / "store", items=40)


def log_of(store, user):
    return store.items_N[store.offsets_U1[user] : store.offsets_U1[user + 1]].tolist()


def test_the_query_is_the_newest_part_of_the_known_log(store):
    ours = Recommender.build(small_recipe(sampler={"max_len": 4}), store)
    batch = latest_behaviours(ours, store, moments(store, [USER, 1], [3, 16]))
    assert batch.items_T.tolist() == log_of(store, USER)[:3] + log_of(store, 1)[12:16]
    assert batch.supervised_T.nonzero().flatten().tolist() == [2, 6]


def test_a_stepped_window_begins_at_a_step(tmp_path):
    store = small_store(tmp_path, mean_length=30)
    lengths = {"model": {"max_len": 32}, "sampler": {"max_len": 32}}
    for rule, first in (("latest", 5), ("stepped", 8)):
        ours = Recommender.build(small_recipe(window=rule, **lengths), store)
        batch = latest_behaviours(ours, store, moments(store, [1], [37]))
        assert batch.items_T.tolist() == log_of(store, 1)[first:37]


@TASKS
def test_unseen_items_come_best_first_and_seen_ones_never(store, changes):
    ours = Recommender.build(small_recipe(**changes), store)
    answer = recommend_user(ours, store, USER, count=1000)
    assert set(answer.items) == set(range(store.num_items)) - set(log_of(store, USER))
    assert answer.scores == sorted(answer.scores, reverse=True)
    assert recommend_user(ours, store, USER, count=3).items == answer.items[:3]


@TASKS
def test_repeats_are_recommended_where_they_are_allowed(store, changes):
    ours = Recommender.build(small_recipe(**changes, repeat="allow"), store)
    assert len(recommend_user(ours, store, USER, count=1000).items) == store.num_items
    kept = recommend_user(ours, store, USER, count=1000, repeat="exclude").items
    assert not set(kept) & set(log_of(store, USER))


@TASKS
def test_many_users_at_once_have_the_answers_of_each_alone(store, changes):
    ours = Recommender.build(small_recipe(**changes), store)
    users = list(range(store.num_users))
    together = recommend(ours, store, users, 5)
    alone = [recommend_user(ours, store, user, 5) for user in users]
    assert [answer.items for answer in together] == [answer.items for answer in alone]
    assert [answer.history for answer in together] == [answer.history for answer in alone]
    assert [answer.user for answer in together] == users


def test_retrieval_scores_are_queries_times_catalogue(store):
    ours = Recommender.build(small_recipe(), store)
    answer = recommend_user(ours, store, USER, count=5)
    products = user_vectors(ours, store, [USER]) @ item_vectors(ours, answer.items).T
    assert torch.allclose(products[0], torch.tensor(answer.scores))
    assert torch.allclose(score(ours, store, [USER], answer.items)["score"], products)


@TASKS
def test_scores_of_given_items_are_those_of_the_recommendation(store, changes):
    ours = Recommender.build(small_recipe(**changes), store)
    answers = recommend(ours, store, [USER, 1], 4)
    given = np.array([answer.items for answer in answers])
    (scores_BC,) = score(ours, store, [USER, 1], given).values()
    expected = torch.tensor([answer.scores for answer in answers])
    assert torch.allclose(scores_BC, expected, atol=1e-6)


def test_only_allowed_items_are_recommended(store):
    ours = Recommender.build(small_recipe(), store)
    allowed = np.arange(store.num_items) % 2 == 0
    answer = recommend_user(ours, store, USER, count=1000, allowed_N=allowed)
    assert set(answer.items) == set(np.flatnonzero(allowed)) - set(log_of(store, USER))


@pytest.mark.parametrize("changes", [NEXT, RANKING], ids=["retrieval", "ranking"])
def test_the_request_time_reaches_the_model(store, changes):
    ours = Recommender.build(small_recipe(**changes), store)
    last = int(store.timestamps_N[store.offsets_U1[USER + 1] - 1])

    def scores(*times):
        answer = recommend_user(ours, store, USER, 1000, request_times=list(times) or None)
        return dict(zip(answer.items, answer.scores, strict=True))

    assert scores() == scores(last) != scores(last + 10**7)
    with pytest.raises(SlipstreamError, match="before the user's last behaviour"):
        scores(last - 1)


@TASKS
def test_a_given_history_has_the_answers_of_the_same_log(store, changes):
    ours = Recommender.build(small_recipe(**changes, user_features=["age"]), store)
    users, known = [USER, 1, 0], [3, 16, 1]
    parts = [
        slice(int(store.offsets_U1[user]), int(store.offsets_U1[user]) + count)
        for user, count in zip(users, known, strict=True)
    ]
    histories = [
        History(
            store.items_N[part].tolist(),
            store.timestamps_N[part],
            {name: values_N[part] for name, values_N in store.actions.items()},
        )
        for part in parts
    ]
    view = GivenHistories(store, histories, users)
    given = recommend(ours, view, range(3), 5)
    asked = recommend(ours, store, users, 5, known=known)
    assert [answer.items for answer in given] == [answer.items for answer in asked]
    assert [answer.scores for answer in given] == [answer.scores for answer in asked]
    strangers = recommend(ours, GivenHistories(store, histories), range(3), 5)
    assert [answer.scores for answer in strangers] != [answer.scores for answer in asked]
    told = [
        replace(each, user_features={"age": user % 3})
        for user, each in zip(users, histories, strict=True)
    ]
    assert recommend(ours, GivenHistories(store, told), range(3), 5) == given


def test_a_history_without_behaviours_is_refused(store):
    ours = Recommender.build(small_recipe(), store)
    view = GivenHistories(store, [History([], [])])
    with pytest.raises(SlipstreamError, match="at least one"):
        recommend(ours, view, [0])


def test_similar_items_are_the_nearest_by_cosine(store):
    ours = Recommender.build(small_recipe(loss={"normalize": False}), store)
    rows, cosines = similar_items(ours, [3, 7], 5)
    vectors = item_vectors(ours)
    expected = torch.nn.functional.cosine_similarity(vectors[3], vectors, dim=1)
    expected[3] = -1
    assert rows[0].tolist() == expected.argsort(descending=True)[:5].tolist()
    assert torch.allclose(cosines[0], expected[rows[0]])
    assert 7 not in rows[1] and similar_items(ours, [3], 1000)[0].shape == (1, 39)


def test_a_ranking_run_has_no_vector_of_a_user(store):
    ours = Recommender.build(small_recipe(**RANKING), store)
    with pytest.raises(SlipstreamError, match="no vector of a user"):
        user_vectors(ours, store, [USER])
    assert item_vectors(ours).shape == (store.num_items, 8)
