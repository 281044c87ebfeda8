"""A bundle holds all that a run's answers need: the engine scores as the recommender does."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from slipstream.bundle import DESCRIPTION, read_bundle
from slipstream.data.sampler import evaluation_batches
from slipstream.errors import SlipstreamError
from slipstream.history.user_history import History
from slipstream.serving.engine.engine import Engine
from slipstream.training.export import export_recommender
from slipstream.training.recommendation import recommend_user, score
from slipstream.training.recommender import Recommender
from slipstream.training.run import open_run, train
from tests.support.training_fixtures import RICH, recommender_of, small_recipe, small_store

RANKING = {
    "task": "ranking",
    "tasks": {"click": {"column": "click"}, "like": {"column": "like"}},
    "loss": {"kind": "bce"},
}
ROUNDING = 1e-5


def test_a_recommender_made_from_a_bundle_answers_alike(tmp_path):
    store = small_store(tmp_path / "store", rich=True)
    items = ["genre", "colours", "price"]
    recipe = small_recipe(data="somewhere", item_features=items, user_features=["age"])
    ours = Recommender.build(recipe, store)
    version = export_recommender(ours, store, tmp_path / "bundle", validation={"HR@10": 0.5})
    bundle = read_bundle(tmp_path / "bundle")
    assert "data" not in bundle.description["recipe"] and version
    again = recommender_of(bundle)
    batch = next(evaluation_batches(store, "test", max_len=8))
    assert torch.equal(again.queries_SD(batch), ours.queries_SD(batch))
    assert torch.equal(again.catalogue_ND(), ours.catalogue_ND())


def values_of(store, user):
    """A user's features as a caller knows them: labels and numbers."""
    told = {}
    for name, feature in store.user_features.items():
        if feature.kind == "number":
            told[name] = float(feature.values[user])
        elif feature.kind == "category":
            told[name] = feature.labels[int(feature.codes[user])].as_py()
        else:
            start, end = feature.offsets_V1[user : user + 2]
            told[name] = [feature.labels[int(code)].as_py() for code in feature.codes[start:end]]
    return told


def history_of(store, user, last=8):
    end = store.offsets_U1[user + 1]
    begin = max(store.offsets_U1[user], end - last)
    return History(
        [store.items.id(int(row)) for row in store.items_N[begin:end]],
        store.timestamps_N[begin:end].tolist(),
        {name: values[begin:end].tolist() for name, values in store.actions.items()},
        values_of(store, user),
        context={
            name: [column.labels[int(code)].as_py() for code in column.codes[begin:end]]
            for name, column in store.context.items()
        },
    )


@pytest.mark.parametrize("changes", [{}, RANKING], ids=["retrieval", "ranking"])
@pytest.mark.parametrize("timed", [True, False])
def test_the_engine_scores_features_of_every_kind_as_the_recommender_does(tmp_path, changes, timed):
    store = small_store(tmp_path / "store", rich=True, timed=timed)
    recipe = small_recipe(**RICH, **changes, train={"epochs": 3})
    train(recipe, store, tmp_path / "run", quiet=True)
    _, _, ours = open_run(tmp_path / "run", store)
    export_recommender(ours, store, tmp_path / "bundle")
    engine, seen, moved = Engine(tmp_path / "bundle"), 0, 0.0
    for user in range(store.num_users):
        told = recommend_user(ours, store, user, store.num_items)
        if not told.items:
            continue
        given = history_of(store, user)
        if not timed:  # whatever times come are not read
            given = replace(given, timestamps=np.arange(len(given)) + 7)
        items = [store.items.id(row) for row in told.items]
        scores = engine.rank(engine.prefill(given), None, items, request_time=None if timed else 9)
        assert scores[engine.tasks[0]] == pytest.approx(np.array(told.scores), abs=ROUNDING)
        seen += 1
        unread = engine.rank(None, replace(given, context={}), items)[engine.tasks[0]]
        moved = max(moved, float(np.abs(unread - told.scores).max()))
    assert seen > 6 and moved > 10 * ROUNDING  # context is read


def test_candidates_have_the_context_of_their_request(tmp_path):
    store = small_store(tmp_path / "store", rich=True)
    ours = Recommender.build(small_recipe(**RICH, **RANKING), store)
    export_recommender(ours, store, tmp_path / "bundle")
    engine, items = Engine(tmp_path / "bundle"), list(range(store.num_items))
    given = history_of(store, 1)
    ids, found = [store.items.id(row) for row in items], {}
    for code, label in enumerate([None, "cart", "home", "search"]):
        told = score(ours, store, [1], items, context={"surface": code})
        for prefix, recent in ((None, given), (engine.prefill(given), None)):
            scores = engine.rank(prefix, recent, ids * 40, context={"surface": label})  # tiles
            for task, expected in told.items():
                assert scores[task] == pytest.approx(expected[0].repeat(40).numpy(), abs=ROUNDING)
        found[label] = told["click"]
    assert not torch.allclose(found["home"], found["cart"])
    with pytest.raises(SlipstreamError, match="no context 'surfaces'; it reads surface, device"):
        engine.rank(None, given, ids, context={"surfaces": "home"})


def test_a_bundle_tells_labels_edges_kinds_and_times(tmp_path):
    store = small_store(tmp_path / "store", rich=True, timed=False)
    ours = Recommender.build(small_recipe(**RICH), store)
    export_recommender(ours, store, tmp_path / "bundle")
    bundle = read_bundle(tmp_path / "bundle")
    sizes = bundle.description["sizes"]
    assert sizes["timed"] is False and not bundle.timed
    assert sizes["user_kinds"] == {"hobbies": "categories", "age": "category", "income": "number"}
    labels = {"hobbies": 5, "age": 3}
    assert bundle.description["user_labels"] == {
        name: [f"label {code}" for code in range(count)] for name, count in labels.items()
    }
    edges = {
        table: list(each.edges)
        for table, each in ours.features.by_table().items()
        if each.kind == "number"
    }
    assert bundle.description["context_labels"] == {
        "surface": ["", "cart", "home", "search"],
        "device": ["", "app", "web"],
    }
    assert bundle.description["number_edges"] == edges and set(edges) == {
        "item.price",
        "user.income",
    }
    assert (bundle.repeat, bundle.window, bundle.max_len) == ("exclude", "latest", 8)


def test_a_bundle_of_the_first_format_scores_as_it_did(tmp_path):
    store = small_store(tmp_path / "store")
    recipe = small_recipe(item_features=["genre"], user_features=["age"])
    export_recommender(Recommender.build(recipe, store), store, tmp_path / "bundle")
    given = History([2**62, 2**62 + 3], [5, 9], {}, {"age": 2})
    new = Engine(tmp_path / "bundle").rank(None, given, [2**62 + 1])
    description = json.loads((tmp_path / "bundle" / DESCRIPTION).read_text())
    for key in ("user_labels", "number_edges", "digests"):
        del description[key]
    for key in ("user_kinds", "timed"):
        del description["sizes"][key]
    for key in ("repeat", "window", "number_bins"):
        del description["recipe"][key]
    (tmp_path / "bundle" / DESCRIPTION).write_text(json.dumps(description | {"format": 1}))
    old = Engine(tmp_path / "bundle").rank(None, given, [2**62 + 1])
    assert new["score"] == old["score"]


def test_a_store_is_not_replaced_by_a_bundle_of_it(tmp_path):
    store = small_store(tmp_path / "store")
    ours = Recommender.build(small_recipe(), store)
    with pytest.raises(SlipstreamError, match="its own input"):
        export_recommender(ours, store, tmp_path / "store", force=True)
    with pytest.raises(SlipstreamError, match="its own input"):
        export_recommender(ours, store, tmp_path / "run", force=True, inputs=[tmp_path / "run"])
    export_recommender(ours, store, tmp_path / "bundle")
    with pytest.raises(SlipstreamError, match="--force"):
        export_recommender(ours, store, tmp_path / "bundle")


def test_the_catalogue_of_retrieval_is_the_item_table_alone(tmp_path):
    store = small_store(tmp_path / "store", rich=True)
    recipe = small_recipe(**RICH, loss={"normalize": False})
    ours = Recommender.build(recipe, store)
    before, batch = ours.catalogue_ND().clone(), next(evaluation_batches(store, "test", max_len=8))
    queries_SD = ours.queries_SD(batch)
    with torch.no_grad():
        ours.tables["item.colours"].all_rows().add_(1.0)
    assert torch.equal(ours.catalogue_ND(), before)  # a cold item is scored by its own row
    assert not torch.equal(ours.queries_SD(batch), queries_SD)  # features are read in histories
