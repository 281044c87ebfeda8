"""Lengths, balance and keys of batches: expected values against draws, laws against data."""

import numpy as np
import pytest

from slipstream.data.choices import Choices
from slipstream.data.preparation import prepare
from slipstream.data.store import SequenceStore
from slipstream.data.synthetic import Synthetic
from slipstream.simulate.workload import Workload


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    shape = Synthetic(users=300, items=400, seed=0)
    prepare("synthetic", folder / "store", Choices(synthetic=shape))
    return folder / "store"


def workload(**values) -> Workload:
    return Workload.model_validate({"samples": 8, "items": 5000, "negatives": 16} | values)


def test_expected_unique_keys_are_those_of_draws():
    work = workload(zipf=1.1)
    weights = (np.arange(5000) + 1.0) ** -1.1
    rng = np.random.default_rng(0)
    drawn = [np.unique(rng.choice(5000, 800, p=weights / weights.sum())).size for _ in range(20)]
    assert work.unique_keys(800) == pytest.approx(np.mean(drawn), rel=0.03)


def test_negatives_are_drawn_once_a_step_or_for_each_token():
    assert workload().unique_negatives(100) == pytest.approx(16, rel=0.01)
    assert workload(shared_negatives=False).unique_negatives(100) == pytest.approx(
        5000 * (1 - np.exp(-1600 / 5000))
    )


def test_keys_grow_less_than_the_batches_and_neighbours_overlap():
    work = workload()
    assert work.keys(1) < work.keys(10) < 10 * work.keys(1)
    assert 0 < work.overlap(1) < work.overlap(50) <= 1


def test_a_cut_sends_shared_keys_again():
    work = workload(lengths={"median": 200, "sigma": 0})
    assert work.inflation(1) == 1.0 < work.inflation(2) < work.inflation(8) < 8


def test_balance_makes_loads_even():
    lengths = {"median": 100, "sigma": 1.0, "longest": 200}
    spreads = {}
    for balance in ("none", "lpt"):
        work = workload(balance=balance, lengths=lengths, samples=16)
        loads_W, mean = work.draw_loads(32, np.random.default_rng(1))
        assert loads_W.mean() == pytest.approx(1.0) and mean > 0
        spreads[balance] = loads_W.max()
    assert spreads["lpt"] < 1.1 < spreads["none"]


def test_a_store_gives_lengths_popularity_and_measured_cuts(store):
    work, opened = workload(store=str(store), samples=32), SequenceStore.open(store)
    lengths = work.draw_lengths(500, np.random.default_rng(0))
    assert set(lengths.tolist()) <= set(np.minimum(opened.lengths_U, 200).tolist())
    assert work.rows == opened.num_items and work.unique_keys(1e9) <= opened.num_items
    assert 1.0 < work.inflation(4) < 4.0
    assert work.tokens > 32 and work.flops > 0
