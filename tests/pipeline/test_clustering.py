"""Cuts that share keys: complete, balanced, always the same, and better than chance."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.pipeline.clustering import (
    SLACK,
    cluster_samples,
    deal_samples,
    key_inflation,
    window_shares,
)


def topical(samples=64, length=40, topics=8, seed=0):
    """Every sample draws most keys from its own topic."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(length // 2, length, samples)
    topic = rng.integers(0, topics, samples)
    parts = [topic[i] * 200 + np.minimum(rng.zipf(1.3, n), 200) - 1 for i, n in enumerate(lengths)]
    return torch.from_numpy(np.concatenate(parts)), torch.from_numpy(
        np.concatenate([[0], np.cumsum(lengths)])
    )


@given(
    st.lists(st.lists(st.integers(0, 2**62), max_size=12), max_size=30),
    st.integers(1, 9),
)
@settings(max_examples=60, deadline=None)
def test_every_sample_is_in_exactly_one_part(samples, parts):
    keys = torch.tensor([key for sample in samples for key in sample], dtype=torch.int64)
    offsets = torch.tensor([0, *np.cumsum([len(sample) for sample in samples])], dtype=torch.int64)
    for cut in (cluster_samples(keys, offsets, parts), deal_samples(offsets, parts)):
        assert len(cut) == parts and sorted(torch.cat(cut).tolist()) == list(range(len(samples)))


def test_parts_that_share_keys_are_found_and_stay_within_their_tokens():
    keys, offsets = topical()
    cut = cluster_samples(keys, offsets, 8)
    again = cluster_samples(keys.clone(), offsets.clone(), 8)
    assert all(torch.equal(one, other) for one, other in zip(cut, again, strict=True))
    random = list(torch.randperm(64, generator=torch.Generator().manual_seed(0)).tensor_split(8))
    assert key_inflation(keys, offsets, cut) < 2 / 3 * key_inflation(keys, offsets, random)
    tokens = np.array([int(offsets.diff()[part].sum()) for part in cut])
    assert (tokens <= np.maximum(SLACK * window_shares(8) * tokens.sum(), 40)).all()


def test_inflation_is_what_it_says():
    keys, offsets = torch.tensor([1, 2, 2, 3, 3, 4]), torch.tensor([0, 2, 4, 6])
    assert key_inflation(keys, offsets, [torch.tensor([0]), torch.tensor([1, 2])]) == 5 / 4
    assert (
        key_inflation(keys, offsets, [torch.tensor([0, 1, 2]), torch.tensor([], dtype=torch.int64)])
        == 1
    )


def test_the_ends_of_a_window_are_smaller():
    assert window_shares(8).tolist() == pytest.approx([0.5 / 7, *[1 / 7] * 6, 0.5 / 7])
    assert window_shares(2).tolist() == [0.5, 0.5]
