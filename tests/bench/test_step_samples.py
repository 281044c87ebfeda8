"""Made-up batches and lengths have the shape of the real ones."""

import math

import torch

from slipstream.bench import step_samples
from slipstream.bench.step_samples import batch_of

ITEMS = 40
LENGTHS = [1, 7, 12, 3]


def test_movielens_like_lengths_have_its_median_and_mean():
    lengths = step_samples.movielens_like_lengths(100_000)
    assert lengths.min() == 20
    assert lengths.max() <= 2314
    assert math.isclose(sorted(lengths)[50_000], 96, rel_tol=0.03)
    assert math.isclose(lengths.mean(), 166, rel_tol=0.05)


def test_batches_are_jagged_and_have_a_next_behaviour_everywhere():
    batch = batch_of(LENGTHS, ITEMS, seed=5)
    assert batch.lengths_B.tolist() == LENGTHS
    inner = batch.items_T[1:][torch.isin(torch.arange(1, 23), batch.offsets_B1, invert=True)]
    before = batch.next_items_T[:-1][torch.isin(torch.arange(1, 23), batch.offsets_B1, invert=True)]
    assert torch.equal(inner, before)
    assert bool((batch.next_timestamps_T >= batch.timestamps_T).all())
