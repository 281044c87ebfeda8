"""Evaluation against a plain definition, on a store small enough to rank by hand."""

import itertools
import math
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
import torch

from slipstream.data.sampler import evaluation_batches
from slipstream.data.store import SequenceStore, write_store
from slipstream.tables import collection
from slipstream.training import evaluation, metrics
from slipstream.training.recommender import Recommender
from slipstream.training.seen import seen_pairs
from tests.support.training_fixtures import small_recipe

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

    def catalogue_tiles(self):
        for begin in range(0, NUM_ITEMS, 7):
            yield begin, torch.eye(NUM_ITEMS)[begin : begin + 7]

    def item_vectors_CD(self, items_C):
        return torch.eye(NUM_ITEMS)[items_C]

    def queries_SD(self, batch):
        return self.table[evaluation.supervised_places(batch)[0]]

    def predict_SA(self, batch):
        raise AssertionError("retrieval asks for no actions")


def gains_of(above: int, tied: int, k: int = 5) -> tuple[float, float]:
    """HR and NDCG at k, the mean over the ways to break the ties."""
    places = range(above + 1, above + tied + 2)
    hits = sum(p <= k for p in places) / len(places)
    return hits, sum(1 / math.log2(p + 1) for p in places if p <= k) / len(places)


def popularity_order(store) -> list[int]:
    """Items by how often they stand before the last two behaviours of each user, ties by row."""
    logs = [
        store.items_N[a:b] for a, b in zip(store.offsets_U1, store.offsets_U1[1:], strict=False)
    ]
    counts = Counter(item for log in logs for item in log[:-2].tolist())
    return sorted(range(NUM_ITEMS), key=lambda item: (-counts[item], item))


@pytest.mark.parametrize("repeat", ["exclude", "allow"])
@pytest.mark.parametrize(("which", "held_out"), [("validation", 2), ("test", 1)])
@pytest.mark.parametrize("max_len", [2, 200])
def test_full_ranking_equals_the_definition(store, which, held_out, max_len, repeat):
    recommender, expected, popular, repeats = FixedScores(), [], [], 0
    order = popularity_order(store)
    for user in range(store.num_users):
        log = store.items_N[store.offsets_U1[user] : store.offsets_U1[user + 1]].tolist()
        target, seen = log[-held_out], set(log[:-held_out])
        repeats += target in seen
        excluded = seen if repeat == "exclude" else set()
        if target in excluded:
            expected.append((0.0, 0.0))
            popular.append((0.0, 0.0))
            continue
        scores = recommender.table[user].tolist()
        rivals = [i for i in range(NUM_ITEMS) if i != target and i not in excluded]
        above = sum(scores[i] > scores[target] for i in rivals)
        expected.append(gains_of(above, sum(scores[i] == scores[target] for i in rivals)))
        better = [i for i in order[: order.index(target)] if i not in excluded]
        popular.append(gains_of(len(better), 0))
    recipe = small_recipe(sampler={"max_len": max_len}, repeat=repeat)
    result = evaluation.evaluate(recommender, store, recipe, which)
    found = [result[name] for name in ("HR@5", "NDCG@5")]
    assert found == pytest.approx(np.mean(expected, axis=0).tolist())
    baseline = [result[f"popularity {name}"] for name in ("HR@5", "NDCG@5")]
    assert baseline == pytest.approx(np.mean(popular, axis=0).tolist())
    assert result["users"] == store.num_users
    assert result["repeats"] == repeats / store.num_users > 0


@pytest.mark.parametrize("repeat", ["exclude", "allow"])
@pytest.mark.parametrize("normalize", [True, False])
def test_places_by_tiles_are_those_of_the_whole_matrix(store, repeat, normalize, monkeypatch):
    recipe = small_recipe(repeat=repeat, loss={"normalize": normalize})
    ours = Recommender.build(recipe, store)
    with torch.no_grad():
        ours.tables["item"].all_rows()[10:20] = ours.tables["item"].all_rows()[:10]  # ties
    monkeypatch.setattr(collection, "CHUNK", 7)
    monkeypatch.setattr(evaluation, "SEEN_A_PASS", 30)
    batches = evaluation_batches(store, "test", max_len=8, batch_size=3)
    passes = list(evaluation.group_queries(ours, batches, evaluation.ALONE))
    assert len(passes) > 1 and sum(len(asked.users_S) for asked in passes) == store.num_users
    for asked in passes:
        seen = seen_pairs(store, asked.users_S, asked.known_S) if repeat == "exclude" else None
        whole_SN = asked.queries_SD @ ours.catalogue_ND().T
        expected = metrics.target_places(whole_SN, asked.targets_S, seen)
        found = evaluation.target_places(ours, store, recipe, asked)
        assert [each.tolist() for each in found] == [each.tolist() for each in expected]


def test_several_held_out_behaviours_are_each_asked_as_if_it_were_the_next(store):
    recipe = small_recipe(split={"validation": 0, "test": 2}, sampler={"max_len": 2})
    result = evaluation.evaluate(FixedScores(), store, recipe, "test")
    assert result["users"] == 2 * store.num_users


def test_the_slices_add_up_to_the_whole(store):
    done = evaluation.evaluate_in_detail(FixedScores(), store, small_recipe(), "test")
    for name in ("history length", "target popularity"):
        rows = [row for row in done.slices if row["by"] == name]
        assert 2 <= len(rows) <= 4 and sum(row["users"] for row in rows) == store.num_users
        total = sum(row["users"] * row["HR@10"] for row in rows) / store.num_users
        assert total == pytest.approx(done.figures["HR@10"])
        assert all(a["to"] < b["from"] for a, b in itertools.pairwise(rows))


def test_a_store_without_held_out_behaviours_has_figures_of_no_user(store):
    recipe = small_recipe(split={"validation": 1, "test": 100})
    assert evaluation.evaluate(FixedScores(), store, recipe, "test")["users"] == 0


def test_sampled_negatives_exclude_training_items_only(store):
    for user in range(store.num_users):
        log = store.items_N[store.offsets_U1[user] : store.offsets_U1[user + 1]]
        trained = len(log) - 2
        drawn = evaluation.sampled_negatives(store, user, trained, seed=1, count=2_000)
        assert drawn.numel() == 2_000
        assert set(drawn.tolist()) == set(range(NUM_ITEMS)) - set(log[:-2].tolist())
        again = evaluation.sampled_negatives(store, user, trained, seed=1, count=2_000)
        assert torch.equal(drawn, again)


def test_supervised_places_count_the_whole_log(store):
    batch = next(iter(evaluation_batches(store, "test", max_len=2, batch_size=100)))
    users, known = evaluation.supervised_places(batch)
    assert users.tolist() == list(range(12)) and known.tolist() == [n - 1 for n in range(3, 15)]
