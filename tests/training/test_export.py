"""A bundle holds all that a run's answers need."""

import torch

from slipstream.bundle import read_bundle
from slipstream.data.sampler import evaluation_batches
from slipstream.training.export import export_recommender
from slipstream.training.recommender import Recommender
from tests.support.training_fixtures import recommender_of, small_recipe, small_store


def test_a_recommender_made_from_a_bundle_answers_alike(tmp_path):
    store = small_store(tmp_path / "store")
    recipe = small_recipe(data="somewhere", item_features=["genre"], user_features=["age"])
    ours = Recommender.build(recipe, store)
    version = export_recommender(ours, store, tmp_path / "bundle", validation={"HR@10": 0.5})
    bundle = read_bundle(tmp_path / "bundle")
    assert "data" not in bundle.description["recipe"] and version
    again = recommender_of(bundle)
    batch = next(evaluation_batches(store, "test", max_len=8))
    assert torch.equal(again.queries_SD(batch), ours.queries_SD(batch))
    assert torch.equal(again.catalogue_ND(), ours.catalogue_ND())
