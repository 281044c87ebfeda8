"""Answers of a run and of its bundle: original ids, plain arithmetic, the same numbers."""

import numpy as np
import polars as pl
import pytest
import torch

import slipstream as ss
from slipstream.errors import SlipstreamError
from slipstream.ops.row_readers import TensorRows
from slipstream.training.recommendation import recommend as recommend_rows
from slipstream.training.recommendation import score as score_rows
from slipstream.training.run import train
from tests.support.api_runs import IDS, prepare_and_train
from tests.support.training_fixtures import RICH, small_recipe, small_store

CLOSE = 1e-5


@pytest.fixture(scope="module", params=["numbers", "text"])
def pair(request, tmp_path_factory) -> tuple[ss.Run, ss.BundleModel]:
    run = prepare_and_train(tmp_path_factory.mktemp(request.param), request.param)
    bundle = ss.load(run.export(run.directory.parent / "bundle"), data=run.store)
    assert isinstance(bundle, ss.BundleModel)
    return run, bundle


@pytest.fixture(scope="module")
def run(pair) -> ss.Run:
    return pair[0]


def log_of(run: ss.Run, user) -> list:
    row = run.store.users.row(user)
    start, end = run.store.offsets_U1[row : row + 2]
    return [run.store.items.id(item) for item in run.store.items_N[start:end]]


def test_recommend_gives_original_ids_in_order(run):
    users, items = (set(each) for each in IDS["numbers" if run.items.numeric else "text"])
    found = run.recommend(k=3)
    assert found.columns[:4] == ["user", "rank", "item", "score"]
    assert set(found["user"]) == users and set(found["item"]) <= items
    for (user,), part in found.group_by("user"):
        assert part["rank"].to_list() == list(range(1, len(part) + 1))
        assert part["score"].is_sorted(descending=True)
        assert not set(part["item"]) & set(log_of(run, user))


def test_recommend_is_what_the_training_room_recommends(run):
    rows = list(range(run.store.num_users))
    for told in recommend_rows(run.recommender, run.store, rows, 5):
        found = run.recommend(run.store.users.id(told.user), k=5)
        assert found["item"].to_list() == [run.store.items.id(row) for row in told.items]
        np.testing.assert_allclose(found["score"], told.scores, atol=CLOSE)


def test_repeat_allows_or_excludes_what_was_seen(run):
    user = run.store.users.id(0)
    everything = run.recommend(user, k=100, repeat="allow")
    assert set(everything["item"]) == {run.items.id(row) for row in range(len(run.items))}
    unseen = run.recommend(user, k=100, repeat="exclude")
    assert unseen["item"].to_list() == [
        item for item in everything["item"] if item not in log_of(run, user)
    ]


def test_filter_is_a_function_or_a_collection_and_exclude_its_opposite(run):
    wanted = [run.items.id(row) for row in (1, 4, 7)]
    ask = {"repeat": "allow", "k": 100}
    whole = run.recommend(**ask)
    expected = whole.filter(pl.col("item").is_in(wanted)).select("user", "item", "score")
    for chosen in (wanted, set(wanted), np.array(wanted), lambda item: item in wanted):
        assert run.recommend(filter=chosen, **ask).select("user", "item", "score").equals(expected)
    left = run.recommend(exclude=wanted, **ask)
    assert not set(left["item"]) & set(wanted) and len(left) == len(whole) - len(expected)
    assert run.recommend(filter=lambda item: False).is_empty()


def test_scores_are_products_of_the_vectors(run):
    users, items = run.user_vectors(), run.item_vectors()
    scored = run.score(users["user"], items["item"])
    products = users["vector"].to_numpy() @ items["vector"].to_numpy().T
    np.testing.assert_allclose(scored["score"].to_numpy(), products.ravel(), atol=CLOSE)
    assert scored["user"].to_list() == np.repeat(users["user"].to_list(), len(items)).tolist()
    best = run.recommend(k=1, repeat="allow")["item"].to_list()
    assert best == [items["item"][int(row.argmax())] for row in products]


def test_vectors_are_those_of_the_recommender(run):
    vectors = run.item_vectors()["vector"].to_numpy()
    np.testing.assert_allclose(vectors, run.recommender.catalogue_ND().numpy(), atol=CLOSE)
    chosen = [run.items.id(3), run.items.id(0)]
    assert run.item_vectors(chosen)["item"].to_list() == chosen
    assert run.item_vectors(chosen)["vector"].to_numpy().tolist() == vectors[[3, 0]].tolist()


def test_similar_items_are_nearest_by_cosine(run):
    item, vectors_ND = run.items.id(2), torch.tensor(run.item_vectors()["vector"].to_numpy())
    cosines = torch.nn.functional.cosine_similarity(vectors_ND, vectors_ND[2:3])
    cosines[2] = -2
    found = run.similar_items(item, k=4)
    assert found["item"].to_list() == [run.items.id(row) for row in cosines.topk(4).indices]
    np.testing.assert_allclose(found["score"], cosines.topk(4).values, atol=CLOSE)
    assert len(run.similar_items(item, k=100)) == len(run.items) - 1


def test_a_run_and_its_bundle_give_the_same_answers(pair):
    run, bundle = pair
    items = [run.items.id(row) for row in (0, 5)]
    for ask in (
        lambda model: model.recommend(k=4),
        lambda model: model.recommend(histories=[items, items[:1]], k=4, repeat="allow"),
        lambda model: model.score(None, items, request_time=9_999),
        lambda model: model.user_vectors(),
        lambda model: model.item_vectors(),
        lambda model: model.similar_items(items[0], 3),
    ):
        ours, theirs = ask(run), ask(bundle)
        assert ours.columns == theirs.columns and len(ours) == len(theirs)
        for name in ours.columns:
            if name in ("score", "vector"):
                np.testing.assert_allclose(
                    ours[name].to_numpy(), theirs[name].to_numpy(), atol=CLOSE
                )
            else:
                assert ours[name].to_list() == theirs[name].to_list()


def test_a_history_by_hand_is_answered_like_the_stored_one(run):
    row = 3
    start, end = run.store.offsets_U1[row : row + 2]
    user = run.store.users.id(row)
    times = run.store.timestamps_N[start:end].tolist()
    by_hand = run.recommend(histories=ss.History(log_of(run, user), times), k=5)
    stored = run.recommend(user, k=5)
    assert by_hand["item"].to_list() == stored["item"].to_list()
    assert by_hand["score"].to_list() == pytest.approx(stored["score"].to_list(), abs=CLOSE)
    named = run.recommend(histories={"me": {"items": log_of(run, user), "timestamps": times}}, k=5)
    assert set(named["user"]) == {"me"} and named["item"].to_list() == stored["item"].to_list()


def test_titles_stand_beside_the_items(pair):
    for model in pair:
        found = model.recommend(k=2)
        if model.items.numeric:
            assert "title" not in found.columns
        else:
            assert found["title"].to_list() == [f"Title of {item}" for item in found["item"]]
            assert "title" in model.score(model.data.users.id(0), [model.items.id(0)]).columns


def test_nobody_gets_an_empty_table_of_the_right_types(run):
    found = run.recommend([])
    assert found.is_empty() and found.columns[:4] == ["user", "rank", "item", "score"]
    assert found.schema == run.recommend(k=1).schema
    assert run.score([], [run.items.id(0)]).is_empty()
    assert run.item_vectors([]).schema == run.item_vectors().schema
    assert run.user_vectors([]).schema == run.user_vectors().schema


def test_ties_are_ordered_by_the_catalogue(run, monkeypatch):
    alike = TensorRows(torch.zeros(run.engine.item_vectors.shape))
    monkeypatch.setattr(run.engine.search, "rows", alike)
    found = run.recommend(run.store.users.id(0), k=4, repeat="allow")
    assert found["item"].to_list() == [run.items.id(row) for row in range(4)]


def test_only_the_window_is_read_but_the_whole_history_counts_as_seen(run):
    items = [run.items.id(row) for row in range(12)]
    long = [items[0]] + [items[1 + n % 3] for n in range(250)]
    short = long[-run.recipe.sampler.max_len :]
    assert items[0] not in short
    asked = run.recommend(histories=[long, short], k=100)
    first, second = asked.filter(user=0), asked.filter(user=1).filter(pl.col("item") != items[0])
    assert items[0] not in first["item"] and items[0] in asked.filter(user=1)["item"]
    assert first["item"].to_list() == second["item"].to_list()
    np.testing.assert_allclose(first["score"], second["score"], atol=CLOSE)


def test_a_ranking_model_scores_every_task(tmp_path):
    tasks = {"liked": {"column": "liked"}, "again": {"column": "liked", "threshold": 0.1}}
    run = prepare_and_train(tmp_path, task="ranking", tasks=tasks, loss="bce")
    bundle = ss.load(run.export(tmp_path / "bundle"), data=run.store)
    user, items = run.store.users.id(0), [run.items.id(row) for row in range(3)]
    for model in (run, bundle):
        found = model.score(user, items)
        assert found.columns == ["user", "item", "score", "liked", "again"]
        assert found["score"].to_list() == found["liked"].to_list()
        assert found["score"].is_between(0, 1).all()
        best = model.recommend(user, k=3, filter=items, repeat="allow")
        assert set(best["score"]) == set(found["score"])
        with pytest.raises(SlipstreamError, match="users have no vector; use score"):
            model.user_vectors(user)
        assert len(model.similar_items(items[0], 2)) == 2
    told = recommend_rows(run.recommender, run.store, [0], 2)[0]
    assert run.recommend(user, k=2)["score"].to_list() == pytest.approx(told.scores, abs=CLOSE)


def test_candidates_are_scored_in_the_context_that_is_given(tmp_path):
    store = small_store(tmp_path / "store", rich=True)
    tasks = {"like": {"column": "like"}}
    recipe = small_recipe(task="ranking", tasks=tasks, loss={"kind": "bce"}, **RICH)
    train(recipe, store, tmp_path / "run", quiet=True)
    run = ss.load(tmp_path / "run", data=store)
    user, items = store.users.id(3), [store.items.id(row) for row in range(5)]
    for label, code in (("home", 2), ("cart", 1), (None, 0)):
        told = score_rows(run.recommender, store, [3], range(5), context={"surface": code})
        found = run.score(user, items, context={"surface": label})
        assert found["like"].to_list() == pytest.approx(told["like"][0].tolist(), abs=CLOSE)
        best = run.recommend(user, filter=items, repeat="allow", context={"surface": label})
        assert set(best["score"]) == set(found["score"])
    with pytest.raises(SlipstreamError, match="no context 'surfaces'; it reads surface, device"):
        run.score(user, items, context={"surfaces": "home"})
