"""What is held out, and what is known of it without a model."""

import itertools

import numpy as np
import pyarrow as pa
import pytest

from slipstream.data.store import SequenceStore, write_store
from slipstream.training import held_out
from slipstream.training.held_out import describe_held_out, held_out_behaviours, untrained_users
from slipstream.training.ranks import Ranks
from tests.support.training_fixtures import small_recipe, small_store


@pytest.fixture
def store(tmp_path):
    """Logs 0 1 2 3 0, then 1 1 4, then 2 (too short to split)."""
    items = pa.table({"id": pa.array(np.arange(5))})
    users = pa.table({"id": pa.array(np.arange(3))})
    log = np.array([0, 1, 2, 3, 0, 1, 1, 4, 2])
    write_store(tmp_path, np.array([0, 5, 8, 9]), log, np.arange(9), {}, items, users, {})
    return SequenceStore.open(tmp_path)


def test_a_split_holds_out_the_end_of_each_log(store):
    recipe = small_recipe()
    test = held_out_behaviours(store, recipe, "test")
    assert (test.users_S.tolist(), test.known_S.tolist()) == ([0, 1], [4, 2])
    assert (test.items_S.tolist(), test.times_S.tolist()) == ([0, 4], [4, 7])
    several = held_out_behaviours(store, small_recipe(split={"validation": 2}), "validation")
    assert (several.users_S.tolist(), several.known_S.tolist()) == ([0, 0], [2, 3])


def test_repeats_and_cold_shares_are_counted(store):
    figures = describe_held_out(store, small_recipe(), "test")
    assert figures["repeats"] == 0.5  # item 0 of the first log
    assert figures["cold_items"] == 0.5  # item 4 stands nowhere in training
    assert figures["cold_users"] == 0.5  # one training behaviour asks for no next one
    assert untrained_users(store, small_recipe()).tolist() == [False, True, True]


def test_ranks_add_up_their_shares(tmp_path, monkeypatch):
    store, recipe = small_store(tmp_path, users=50), small_recipe()
    monkeypatch.setattr(held_out, "TILE", 4)
    whole = describe_held_out(store, recipe, "test")
    sums = []

    class Collecting(Ranks):
        def sum(self, values):
            sums.append(list(values))
            return list(values)

    for rank in range(3):
        describe_held_out(store, recipe, "test", Collecting(rank, 3))
    total = np.sum(sums, axis=0)
    count = len(held_out_behaviours(store, recipe, "test"))
    assert total[3] == count and total[0] / count == whole["repeats"]
    assert total[4] / count == pytest.approx(whole["popularity HR@1"])


@pytest.mark.parametrize("by", ["time", "users"])
@pytest.mark.parametrize("which", ["validation", "test"])
def test_every_split_describes_what_it_holds_out(tmp_path, by, which):
    """Cold shares and counts, by plain loops over the parts."""
    recipe = small_recipe(split={"by": by, "validation": 0.3, "test": 0.3})
    store = small_store(tmp_path / "store")
    part, trained = recipe.split.held_out(store, which), recipe.split.train_lengths(store)
    logs = [store.items_N[a:b].tolist() for a, b in itertools.pairwise(store.offsets_U1)]
    training = {item for log, n in zip(logs, trained, strict=True) for item in log[:n]}
    asked = [
        (user, place)
        for user in range(store.num_users)
        for place in range(part.begins_U[user], part.ends_U[user])
    ]
    found = held_out_behaviours(store, recipe, which)
    assert list(zip(found.users_S.tolist(), found.known_S.tolist(), strict=True)) == asked
    figures = describe_held_out(store, recipe, which)
    cold_users = sum(trained[user] < 2 for user, _ in asked) / len(asked)
    cold_items = sum(logs[u][place] not in training for u, place in asked) / len(asked)
    repeats = sum(logs[u][place] in logs[u][:place] for u, place in asked) / len(asked)
    assert figures["cold_users"] == pytest.approx(cold_users)
    assert figures["cold_items"] == pytest.approx(cold_items)
    assert figures["repeats"] == pytest.approx(repeats)
    assert cold_users == 1 or by == "time"
