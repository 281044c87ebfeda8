"""Features: the tables of a store, the keys of a batch, and the labels of its actions."""

import pytest
import torch

from slipstream.data.sampler import TrainingSampler
from slipstream.errors import SlipstreamError
from slipstream.training.features import Features, labels_TA
from tests.support.training_fixtures import small_recipe, small_store

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


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"item_features": ["gnere"]}, "no item feature 'gnere'; did you mean 'genre'"),
        ({"user_features": ["agee"]}, "no user feature 'agee'; did you mean 'age'"),
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
