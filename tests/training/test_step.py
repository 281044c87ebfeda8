"""The types of one step: keys by purpose, and their rows found again by the same names."""

import torch

from slipstream.data.sampler import TrainingSampler
from slipstream.training.recommender import Recommender
from slipstream.training.step import NEGATIVES_LIST, TableKeys
from tests.support.training_fixtures import read_step, small_recipe, small_store


def test_keys_become_lists_and_places_get_their_names_back():
    inputs, negatives = torch.tensor([3, 1]), torch.tensor([[5, 3]])
    keys = TableKeys(inputs, negatives=negatives)
    assert [each.tolist() for each in keys.lists()] == [[3, 1], [[5, 3]]]
    places = keys.with_places([torch.tensor([1, 0]), torch.tensor([[2, 1]])])
    assert places.inputs.tolist() == [1, 0] and places.targets is None
    assert places.negatives.tolist() == [[2, 1]]


def test_the_list_of_negatives_is_the_one_that_may_travel_in_16_bits():
    keys = TableKeys(torch.tensor([1]), torch.tensor([2]), torch.tensor([3]))
    assert [keys.lists()[place].tolist() for place in NEGATIVES_LIST] == [[3]]


def test_every_row_of_a_step_is_found_by_its_purpose(tmp_path):
    store = small_store(tmp_path / "store")
    recipe = small_recipe(item_features=["genre"], user_features=["age"])
    ours = Recommender.build(recipe, store)
    batch = TrainingSampler(store, recipe.sampler, seed=1, split=recipe.split).next_batch()
    inputs = read_step(ours, batch, 3)
    assert inputs.batch is batch and inputs.plan.count == inputs.plan.supervised_S.numel()
    for table, keys in inputs.plan.keys.items():
        lookup, places = inputs.lookups[table], inputs.places(table)
        for purpose in ("inputs", "targets", "negatives"):
            asked, found = getattr(keys, purpose), getattr(places, purpose)
            assert (asked is None) == (found is None)
            if asked is not None:
                assert torch.equal(lookup.unique_U[found], asked), (table, purpose)
    rows = inputs.input_rows()
    assert torch.equal(rows["item"], ours.tables["item"].gather(batch.items_T))
    assert rows["user.age"].shape[0] == batch.num_users
