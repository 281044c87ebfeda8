"""The baseline: training counts order the items; action rates are training means."""

import numpy as np
import torch

from slipstream.training.metrics import MISSED
from slipstream.training.popularity import (
    PopularityOrder,
    action_rates,
    item_counts,
    popular_items,
)
from slipstream.training.seen import SeenPairs
from tests.support.training_fixtures import small_recipe, small_store

RANKING = {
    "task": "ranking",
    "tasks": {"click": {"column": "click"}, "like": {"column": "like"}},
    "loss": {"kind": "bce"},
}


def test_items_above_a_target_are_the_more_frequent_unseen_ones_ties_by_row():
    order = PopularityOrder(torch.tensor([3, 5, 3, 0, 5]))  # 1, 4, 0, 2, 3
    targets = torch.tensor([2, 3, 4])
    assert order.items_above(targets).tolist() == [3, 4, 1]
    seen = SeenPairs(torch.tensor([0, 0, 1, 2]), torch.tensor([1, 3, 0, 4]))
    assert order.items_above(targets, seen).tolist() == [2, 3, MISSED]


def test_counts_and_rates_are_of_training_behaviours_only(tmp_path):
    store, recipe = small_store(tmp_path, users=30), small_recipe(**RANKING)
    counts, clicks = np.zeros(store.num_items), np.zeros(store.num_items)
    for user, length in enumerate(store.lengths_U):
        for place in range(length - 2 if length > 2 else length):
            at = store.offsets_U1[user] + place
            counts[store.items_N[at]] += 1
            clicks[store.items_N[at]] += store.actions["click"][at]
    assert item_counts(store, recipe).tolist() == counts.tolist()
    rates = action_rates(store, recipe)[:, 0].numpy()
    trained = counts > 0
    assert np.allclose(rates[trained], clicks[trained] / counts[trained])
    assert np.allclose(rates[~trained], clicks.sum() / counts.sum())


def test_popular_items_are_counted_in_training_by_window_of_days(tmp_path, monkeypatch):
    monkeypatch.setattr("slipstream.training.popularity._AT_ONCE", 7)
    monkeypatch.setattr("slipstream.training.popularity.MOST_POPULAR", 5)
    store, recipe = small_store(tmp_path, users=30), small_recipe(**RANKING)
    in_training = np.zeros(len(store.items_N), dtype=bool)
    for user, length in enumerate(store.lengths_U):
        start = store.offsets_U1[user]
        in_training[start : start + (length - 2 if length > 2 else length)] = True
    last = store.timestamps_N[in_training].max()
    found = popular_items(store, recipe)
    for days in (0, 1, 7, 30):
        counted = in_training & ((store.timestamps_N > last - 86_400 * days) if days else np.True_)
        counts = np.bincount(store.items_N[counted], minlength=store.num_items)
        order = np.argsort(-counts, kind="stable")[:5]
        order = order[counts[order] > 0]
        assert found[f"popular/{days}/rows"].tolist() == order.tolist()
        assert found[f"popular/{days}/counts"].tolist() == counts[order].tolist()
    assert len(found) == 8
