"""Evaluation against a plain definition, on a store small enough to rank by hand."""

import math

import numpy as np
import pyarrow as pa
import pytest
import torch

from slipstream.data.sampler import evaluation_batches
from slipstream.data.store import SequenceStore, write_store
from slipstream.training import evaluation

NUM_ITEMS = 30


@pytest.fixture
def store(tmp_path):
    """Twelve users with 3 to 14 behaviours, repeats included."""
    rng = np.random.default_rng(5)
    lengths = np.arange(3, 15)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    items = rng.integers(0, NUM_ITEMS, offsets[-1])
    times = np.concatenate([np.sort(rng.integers(0, 10**6, n)) for n in lengths])
    ids = pa.table({"id": pa.array(np.arange(NUM_ITEMS) * 10)})
    users = pa.table({"id": pa.array(np.arange(lengths.size))})
    write_store(tmp_path, offsets, items, times, {}, ids, users, {})
    return SequenceStore.open(tmp_path)


class FixedScores:
    """A recommender whose score for (user, item) is a fixed table, coarse enough to tie."""

    def __init__(self) -> None:
        self.table = torch.randint(
            0, 6, (12, NUM_ITEMS), generator=torch.Generator().manual_seed(3)
        ).float()

    def catalogue_ND(self):
        return torch.eye(NUM_ITEMS)

    def queries_SD(self, batch):
        return self.table[evaluation.supervised_places(batch)[0]]

    def predict_SA(self, batch):
        raise AssertionError("retrieval asks for no actions")


@pytest.mark.parametrize(("which", "held_out"), [("validation", 2), ("test", 1)])
@pytest.mark.parametrize("max_len", [2, 200])
def test_full_ranking_equals_the_definition(store, which, held_out, max_len):
    recommender, hits, gains = FixedScores(), [], []
    for user in range(store.num_users):
        log = store.items_N[store.offsets_U1[user] : store.offsets_U1[user + 1]]
        target, seen = log[-held_out], set(log[:-held_out].tolist())
        scores = recommender.table[user].tolist()
        above = sum(
            scores[i] > scores[target] for i in range(NUM_ITEMS) if i not in seen or i == target
        )
        tied = sum(
            scores[i] == scores[target] for i in range(NUM_ITEMS) if i != target and i not in seen
        )
        places = range(above + 1, above + tied + 2)
        hits.append(sum(p <= 5 for p in places) / len(places))
        gains.append(sum(1 / math.log2(p + 1) for p in places if p <= 5) / len(places))
    batches = evaluation_batches(store, which, max_len=max_len, batch_size=5)
    result = evaluation.evaluate_retrieval(recommender, batches, store)
    assert result["HR@5"] == pytest.approx(np.mean(hits)) and result["NDCG@5"] == pytest.approx(
        np.mean(gains)
    )
    assert result["users"] == store.num_users


def test_sampled_negatives_exclude_training_items_only(store):
    for user in range(store.num_users):
        log = store.items_N[store.offsets_U1[user] : store.offsets_U1[user + 1]]
        drawn = evaluation.sampled_negatives(store, user, 2, seed=1, count=2_000)
        assert drawn.numel() == 2_000
        assert set(drawn.tolist()) == set(range(NUM_ITEMS)) - set(log[:-2].tolist())
        assert torch.equal(drawn, evaluation.sampled_negatives(store, user, 2, seed=1, count=2_000))


def test_supervised_places_count_the_whole_log(store):
    batch = next(iter(evaluation_batches(store, "test", max_len=2, batch_size=100)))
    users, known = evaluation.supervised_places(batch)
    assert users.tolist() == list(range(12)) and known.tolist() == [n - 1 for n in range(3, 15)]
