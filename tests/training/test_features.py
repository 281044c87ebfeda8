"""Features: the tables of a store, the keys of a batch, and the labels of its actions."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from slipstream.data.sampler import TrainingSampler
from slipstream.errors import SlipstreamError
from slipstream.training.features import Features, labels_TA
from tests.support.training_fixtures import RICH, small_recipe, small_store

RANKING = {
    "task": "ranking",
    "tasks": {"click": {"column": "click"}, "never": {"column": "like", "threshold": 2}},
    "loss": {"kind": "bce"},
}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("data") / "store")


def batch_of(store, recipe):
    return TrainingSampler(
        store, recipe.sampler, seed=1, split=recipe.split, task=recipe.task
    ).next_batch()


def test_every_feature_has_a_table_and_keys(store):
    recipe = small_recipe(item_features=["genre"], user_features=["age"])
    features, batch = Features.from_store(recipe, store), batch_of(store, recipe)
    assert features.table_sizes() == {"item": 15, "item.genre": 4, "user.age": 3}
    keys, offsets = features.input_keys(batch)
    assert not offsets
    assert torch.equal(keys["item"], batch.items_T)
    assert torch.equal(keys["item.genre"], batch.items_T % 4)
    assert torch.equal(keys["user.age"], batch.sample_ids_B % 3)


@pytest.fixture(scope="module")
def rich(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("data") / "store", rich=True)


def lists_of(keys, offsets_T1):
    return [part.tolist() for part in keys.tensor_split(offsets_T1[1:-1])]


def test_several_categories_are_all_read_and_none_is_the_unknown_one(rich):
    recipe = small_recipe(**RICH)
    features, batch = Features.from_store(recipe, rich), batch_of(rich, recipe)
    keys, offsets = features.input_keys(batch)
    assert set(offsets) == {"item.colours", "user.hobbies"}
    for table, noun, rows in (
        ("item.colours", rich.item_features["colours"], batch.items_T),
        ("user.hobbies", rich.user_features["hobbies"], batch.sample_ids_B),
    ):
        expected = [
            sorted(set(noun.codes[noun.offsets_V1[row] : noun.offsets_V1[row + 1]].tolist())) or [0]
            for row in rows.tolist()
        ]
        assert lists_of(keys[table], offsets[table]) == expected
        assert table == "user.hobbies" or [0] in expected
    assert features.table_sizes()["item.colours"] == 6


def test_context_is_read_by_the_behaviour(rich):
    recipe = small_recipe(**RICH)
    features, batch = Features.from_store(recipe, rich), batch_of(rich, recipe)
    keys, _ = features.input_keys(batch)
    assert features.table_sizes()["context.surface"] == 4
    for name in ("surface", "device"):
        expected = []
        pairs = zip(batch.sample_ids_B, batch.first_positions_B, batch.lengths_B, strict=True)
        for user, first, length in pairs:
            begin = int(rich.offsets_U1[user] + first)
            expected += rich.context[name].codes[begin : begin + int(length)].tolist()
        assert keys[f"context.{name}"].tolist() == expected and len(set(expected)) > 1
    wrong = small_recipe(context_features=["surfaces"])
    with pytest.raises(SlipstreamError, match="no context column 'surfaces'; did you mean 'surf"):
        Features.from_store(wrong, rich)


def test_bins_of_numbers_come_from_the_training_part_alone(rich):
    recipe = small_recipe(**RICH, split={"validation": 3, "test": 3})
    features = Features.from_store(recipe, rich)
    lengths = recipe.split.train_lengths(rich)
    trained = np.unique(
        np.concatenate(
            [
                rich.items_N[start : start + length]
                for start, length in zip(rich.offsets_U1[:-1], lengths, strict=True)
            ]
        )
    )
    prices = rich.item_features["price"].values
    known = np.sort(prices[trained][~np.isnan(prices[trained])])
    assert 0 < len(trained) < rich.num_items
    price = features.item_features["price"]
    expected = [known[int(np.ceil((len(known) - 1) * share))] for share in (0.25, 0.5, 0.75)]
    assert list(price.edges) == [float(edge) for edge in expected]
    assert price.cardinality == 5 and price.codes[1] == 0
    for row, value in enumerate(prices.tolist()):
        if row != 1:
            assert price.codes[row] == 1 + sum(value >= edge for edge in price.edges)
    batch = batch_of(rich, recipe)
    keys, _ = features.input_keys(batch)
    assert torch.equal(keys["item.price"], price.codes[batch.items_T])
    assert torch.equal(
        keys["user.income"], features.user_features["income"].codes[batch.sample_ids_B]
    )


def test_nothing_is_known_of_a_user_the_store_does_not_have(rich):
    recipe = small_recipe(**RICH)
    features, batch = Features.from_store(recipe, rich), batch_of(rich, recipe)
    nobody = replace(batch, sample_ids_B=torch.full_like(batch.sample_ids_B, -1), user_features={})
    keys, offsets = features.input_keys(nobody)
    for table in ("user.age", "user.income", "user.hobbies"):
        assert keys[table].tolist() == [0] * batch.num_users
    assert lists_of(keys["user.hobbies"], offsets["user.hobbies"]) == [[0]] * batch.num_users


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"item_features": ["gnere"]}, "no item feature 'gnere'; did you mean 'genre'"),
        ({"user_features": ["agee"]}, "no user feature 'agee'; did you mean 'age'"),
        ({"context_features": ["surface"]}, "no context column 'surface'; the store has none"),
        (
            {"task": "ranking", "tasks": {"x": {"column": "clik"}}, "loss": {"kind": "bce"}},
            "no action column 'clik'; did you mean 'click'",
        ),
    ],
)
def test_a_name_the_store_does_not_have_is_refused_with_the_nearest(store, changes, sentence):
    with pytest.raises(SlipstreamError, match=sentence):
        Features.from_store(small_recipe(**changes), store)


def test_an_action_happened_where_its_column_reaches_the_threshold(store):
    recipe = small_recipe(**RANKING)
    batch = batch_of(store, recipe)
    labels = labels_TA(recipe, batch, torch.float64)
    assert labels.dtype == torch.float64 and labels.shape == (batch.num_tokens, 2)
    assert torch.equal(labels[:, 0], (batch.actions["click"] >= 0.5).double())
    assert labels[:, 1].sum() == 0
