"""Seen is the whole log before a moment, each item once."""

import torch

from slipstream.training.seen import seen_pairs
from tests.support.training_fixtures import small_store


def test_seen_is_every_item_of_the_known_log_once(tmp_path):
    store = small_store(tmp_path, users=20)
    users = torch.tensor([1, 3, 1, 0])
    known = torch.tensor([16, 2, 0, 1])
    pairs = seen_pairs(store, users, known)
    expected = {
        (row, int(item))
        for row, (user, count) in enumerate(zip(users.tolist(), known.tolist(), strict=True))
        for item in store.items_N[store.offsets_U1[user] :][:count]
    }
    found = list(zip(pairs.rows_P.tolist(), pairs.items_P.tolist(), strict=True))
    assert len(found) == len(set(found)) and set(found) == expected
    items = torch.arange(4)
    assert pairs.contains(items).tolist() == [(row, row) in expected for row in range(4)]
