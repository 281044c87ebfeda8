"""Training goes on over a store that has grown: the same bits as without a stop."""

import json

import numpy as np
import polars as pl
import pytest
import torch

from slipstream import api
from slipstream.bundle import read_bundle
from slipstream.data import append_log, prepare
from slipstream.errors import SlipstreamError
from slipstream.serving.engine.items import ItemIds
from slipstream.training.export import export_recommender
from slipstream.training.features import Features
from slipstream.training.recommendation import recommend
from slipstream.training.run import open_run, train
from tests.support.grown_steps import steps_without_a_stop
from tests.support.training_fixtures import same_tensors, saved_tensors, small_recipe

BEFORE, AFTER = 5, 12  # steps on the base, and in all


def log(seed, users, items, start):
    rng = np.random.default_rng(seed)
    user = rng.choice(users, 240)
    frame = {
        "user_id": user,
        "item_id": rng.choice(items, 240),
        "timestamp": start + np.arange(240),
        "surface": rng.choice(["home", "search"] if seed == 1 else ["cart", "home", "web"], 240),
    }
    return pl.DataFrame(frame)


@pytest.fixture
def logs():
    base = log(1, np.arange(10, 22), np.arange(100, 130), 0)
    return base, log(2, np.arange(5, 24), np.arange(90, 140), 1_000)


def recipe_of(tables, steps, context=(), **more):
    train_keys = {"max_steps": steps, "epochs": 50, "checkpoint_every": 3, **more}
    return small_recipe(tables=tables, train=train_keys, context_features=context)


@pytest.mark.parametrize(
    "tables",
    [
        {"optimizer": "rowwise_adam"},
        {"optimizer": "adamw"},
        {"tier": "hashed", "admit_after": 2},
        {"tier": "disk"},
    ],
)
def test_a_run_over_a_grown_store_equals_the_steps_without_a_stop(logs, tmp_path, tables):
    if tables.get("tier") == "disk":
        tables = {**tables, "directory": str(tmp_path / "rows")}
    base, context = api.prepare(logs[0], tmp_path / "base", context="surface"), ("surface",)
    train(recipe_of(tables, BEFORE, context), base, tmp_path / "run", quiet=True)
    grown = append_log(tmp_path / "base", logs[1], out=tmp_path / "grown").store
    assert grown.num_items > base.num_items and grown.num_users > base.num_users
    assert grown.context["surface"].labels.to_pylist() == ["", "home", "search", "cart", "web"]
    done = train(recipe_of(tables, AFTER, context), grown, tmp_path / "run", quiet=True)
    assert done.step == AFTER
    in_memory = {key: value for key, value in tables.items() if key != "directory"}
    in_memory |= {"tier": "memory"} if tables.get("tier") == "disk" else {}
    recipe = recipe_of(in_memory, AFTER, context)
    whole = steps_without_a_stop(recipe, base, grown, BEFORE, AFTER)
    _, _, continued = open_run(tmp_path / "run", grown)
    for name, table in whole.tables.tables.items():
        assert torch.equal(table.all_rows(), continued.tables.tables[name].all_rows()), name
    assert same_tensors(whole.model.state_dict(), continued.model.state_dict())


def test_a_second_stop_right_after_the_store_has_grown_changes_nothing(logs, tmp_path):
    base = prepare(logs[0], tmp_path / "base")
    grown = append_log(tmp_path / "base", logs[1], out=tmp_path / "grown").store
    tables = {"optimizer": "rowwise_adam"}
    for name, stops in (("one", (BEFORE, AFTER)), ("two", (BEFORE, BEFORE + 1, AFTER))):
        for store, steps in zip((base, grown, grown), stops, strict=False):
            train(recipe_of(tables, steps), store, tmp_path / name, quiet=True)
    assert same_tensors(saved_tensors(tmp_path / "one"), saved_tensors(tmp_path / "two"))


def test_new_items_are_recommended_exported_and_served_by_their_ids(logs, tmp_path):
    base = prepare(logs[0], tmp_path / "store")
    tables = {"optimizer": "rowwise_adam"}
    recipe = recipe_of(tables, BEFORE, evaluate_every=1)
    train(recipe, base, tmp_path / "run", quiet=True)
    store = append_log(tmp_path / "store", logs[1]).store
    *_, early = open_run(tmp_path / "run")  # of the store before it grew, over all items
    assert early.features.num_items == store.num_items
    longer = recipe_of(tables, 60, evaluate_every=1)
    train(longer, store, tmp_path / "run", quiet=True)
    _, store, recommender = open_run(tmp_path / "run")
    new = set(range(base.num_items, store.num_items))
    answers = recommend(recommender, store, range(store.num_users), 10)
    assert new & {item for answer in answers for item in answer.items}
    export_recommender(recommender, store, tmp_path / "bundle")
    ids = ItemIds(read_bundle(tmp_path / "bundle").items_path)
    originals = [store.items.id(row) for row in range(store.num_items)]
    assert originals != sorted(originals)
    assert ids.rows(originals).tolist() == list(range(store.num_items))
    assert ids.contains(np.array([originals[-1], 7])).tolist() == [True, False]


def test_other_data_are_refused(logs, tmp_path):
    base = prepare(logs[0], tmp_path / "base")
    other = prepare(logs[1], tmp_path / "other")
    train(recipe_of({}, 2), base, tmp_path / "run", quiet=True)
    with pytest.raises(SlipstreamError, match="run on other data"):
        train(recipe_of({}, 4), other, tmp_path / "run", quiet=True)


@pytest.mark.parametrize("scaling", ["quantile", "log"])
def test_numbers_keep_the_bins_of_the_first_store(logs, tmp_path, scaling):
    """Prices of new items are higher, so bins of the grown store would be other ones."""
    items = pl.DataFrame({"item_id": np.arange(90, 140), "price": np.linspace(0, 1, 50) ** 3})
    features = {"items": items, "item_features": {"price": "number"}}
    base = api.prepare(logs[0], tmp_path / "base", **features)
    features = {"item_features": ["price"], "number_bins": 4, "number_scaling": scaling}

    def recipe(steps):
        keys = {"max_steps": steps, "epochs": 50, "checkpoint_every": 3}
        return small_recipe(tables={"optimizer": "rowwise_adam"}, train=keys, **features)

    train(recipe(BEFORE), base, tmp_path / "run", quiet=True)
    grown = append_log(tmp_path / "base", logs[1], items=items, out=tmp_path / "grown").store
    train(recipe(AFTER), grown, tmp_path / "run", quiet=True)
    edges = Features.from_store(recipe(AFTER), base).number_edges()
    assert edges != Features.from_store(recipe(AFTER), grown).number_edges()
    expected = steps_without_a_stop(recipe(AFTER), base, grown, BEFORE, AFTER, edges)
    _, _, found = open_run(tmp_path / "run", grown, which="last")
    assert found.features.number_edges() == edges
    assert same_tensors(found.model.state_dict(), expected.model.state_dict())
    for name in ("item", "item.price"):
        assert torch.equal(found.tables.all_rows(name), expected.tables.all_rows(name))
    export_recommender(found, grown, tmp_path / "bundle")
    assert read_bundle(tmp_path / "bundle").description["number_edges"] == edges
    note = json.loads((tmp_path / "run" / "run.json").read_text())
    note.pop("number_edges")  # as of a run before bins were recorded
    note["store"]["digest"] = base.digest
    (tmp_path / "run" / "run.json").write_text(json.dumps(note))
    with pytest.raises(
        SlipstreamError, match=r"did not record the bins of the number 'item\.price'"
    ):
        train(recipe(AFTER + 1), grown, tmp_path / "run", quiet=True)


def test_the_best_weights_of_the_smaller_store_are_not_those_of_the_grown_one(logs, tmp_path):
    base, tables = prepare(logs[0], tmp_path / "store"), {"optimizer": "rowwise_adam"}
    run, checkpoints = tmp_path / "run", tmp_path / "run" / "checkpoints"
    train(recipe_of(tables, BEFORE, evaluate_every=1), base, run, quiet=True)
    (best,) = checkpoints.glob("best-*")
    best.rename(tmp_path / best.name)
    grown = append_log(tmp_path / "store", logs[1]).store
    done = train(recipe_of(tables, AFTER, evaluate_every=1), grown, run, quiet=True)
    assert done.best_step > BEFORE  # the earlier figures do not compete
    for path in checkpoints.glob("best-*"):  # as if it had ended before its first evaluation
        path.rename(tmp_path / path.name)
    (tmp_path / best.name).rename(checkpoints / best.name)
    *_, opened = open_run(run)
    *_, last = open_run(run, which="last")
    assert same_tensors(opened.model.state_dict(), last.model.state_dict())
