"""Windows cut out of a store, and the behaviours a split holds out."""

import numpy as np
import polars as pl
import pytest

from slipstream.data.choices import Choices, FeatureFile
from slipstream.data.preparation import prepare
from slipstream.data.windows import cut_windows
from tests.support.data_fixtures import GOOD, store_with_lengths

LENGTHS = [4, 1, 6]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return store_with_lengths(tmp_path_factory.mktemp("windows"), LENGTHS)


def log_of(store, user):
    return store.items_N[store.offsets_U1[user] : store.offsets_U1[user + 1]].tolist()


def cut(store, task="retrieval"):
    """Places 1 … 3 of user 2 and 0 … 1 of user 0, of which 5 and 2 behaviours may be known."""
    users, begins, ends, known = (np.array(each) for each in ([2, 0], [1, 0], [4, 2], [5, 2]))
    return cut_windows(store, users, begins, ends, known, np.array([3, 0]), task)


def test_windows_lie_end_to_end_in_the_order_asked(store):
    batch = cut(store)
    assert batch.sample_ids_B.tolist() == [2, 0] and batch.offsets_B1.tolist() == [0, 3, 5]
    assert batch.first_positions_B.tolist() == [1, 0]
    assert batch.items_T.tolist() == log_of(store, 2)[1:4] + log_of(store, 0)[:2]


def test_a_token_knows_the_next_item_only_if_it_may_be_known(store):
    batch = cut(store)
    long, short = log_of(store, 2), log_of(store, 0)
    assert batch.next_items_T.tolist() == [*long[2:5], short[1], -1]
    assert batch.next_timestamps_T[-1] == batch.timestamps_T[-1]


@pytest.mark.parametrize(
    ("task", "supervised"),
    [("retrieval", [0, 1, 1, 1, 0]), ("ranking", [0, 0, 1, 1, 1])],
)
def test_supervised_tokens_ask_for_behaviours_from_a_place_on(store, task, supervised):
    assert cut(store, task).supervised_T.int().tolist() == supervised


def test_a_batch_carries_the_user_features_of_one_category(tmp_path):
    users = pl.DataFrame(
        {"user_id": [1, 2], "plan": ["a", "b"], "age": [1.5, 2.5], "tags": [[], ["x"]]}
    )
    choices = Choices(users=FeatureFile(users, features=("plan", "age", "tags")))
    store = prepare(pl.DataFrame(GOOD), tmp_path / "out", choices)
    ones = np.ones(1, dtype=np.int64)
    batch = cut_windows(store, ones, ones * 0, ones * 2, ones * 2, ones, "retrieval")
    assert {name: codes.tolist() for name, codes in batch.user_features.items()} == {"plan": [2]}
