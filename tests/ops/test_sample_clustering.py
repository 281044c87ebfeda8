"""Samples divided into parts: both back-ends alike, within the limits, near the best division."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.ops.sample_clustering import assign_samples
from tests.support.operator_parity import needs_native


def cost(places, offsets, parts):
    samples = [set(places[a:b].tolist()) for a, b in itertools.pairwise(offsets.tolist())]
    return sum(
        len(set().union(*(samples[i] for i in np.flatnonzero(parts == part))))
        for part in range(int(parts.max()) + 1)
    )


def batch(samples, keys, length, seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, length + 1, samples)
    places = np.minimum(rng.zipf(1.4, lengths.sum()) * rng.integers(1, 4, lengths.sum()), keys) - 1
    return torch.from_numpy(places), torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))


def limits(lengths, parts, slack=1.2):
    share = int(lengths.sum()) / parts
    return torch.full((parts,), int((2 - slack) * share)), torch.full(
        (parts,), max(int(slack * share), int(lengths.max()))
    )


@needs_native
@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 24),
    st.integers(1, 40),
    st.integers(1, 12),
    st.integers(1, 6),
    st.integers(0, 4000),
    st.integers(0, 10**6),
)
def test_both_back_ends_find_the_same_division_within_the_limits(
    samples, keys, length, parts, budget, seed
):
    places, offsets = batch(samples, keys, length, seed)
    lengths = offsets.diff()
    first = torch.arange(samples) % parts
    low, high = limits(lengths, parts)
    found = assign_samples(places, offsets, keys, first, low, high, budget, backend="native")
    assert torch.equal(
        found, assign_samples(places, offsets, keys, first, low, high, budget, backend="reference")
    )
    before, after = (
        torch.zeros(parts, dtype=torch.int64).index_add_(0, each, lengths)
        for each in (first, found)
    )
    assert (after <= torch.maximum(high, before)).all() and (
        after >= torch.minimum(low, before)
    ).all()


@needs_native
@pytest.mark.parametrize("keys", [60, 400, 6000])  # from keys that all samples have to rare ones
def test_shared_keys_as_sets_and_as_lists_give_the_same_division(keys):
    rng, samples, parts = np.random.default_rng(keys), 40, 5
    lengths = rng.integers(20, 60, samples)
    places = torch.from_numpy(rng.integers(0, keys, lengths.sum()))
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
    low, high = limits(torch.from_numpy(lengths), parts)
    first = torch.arange(samples) % parts
    native, plain = (
        assign_samples(places, offsets, keys, first, low, high, 60_000, backend=backend)
        for backend in ("native", "reference")
    )
    assert torch.equal(native, plain) and not torch.equal(native, first)


def test_a_small_batch_gets_the_best_division():
    for seed in range(6):
        places, length = batch(40, 25, 10, seed)[0], 4
        places, offsets = places[: 8 * length], torch.arange(9) * length
        low, high = (torch.full((2,), samples * length) for samples in (3, 5))
        found = assign_samples(places, offsets, 25, torch.tensor([0, 1] * 4), low, high, 30_000)
        every = [
            torch.tensor(cut) for cut in itertools.product((0, 1), repeat=8) if 3 <= sum(cut) <= 5
        ]
        assert cost(places, offsets, found) == min(cost(places, offsets, cut) for cut in every), (
            seed
        )


def test_more_work_finds_better_divisions():
    places, offsets = batch(60, 300, 40, 3)
    low, high = limits(offsets.diff(), 6)
    first = torch.arange(60) % 6
    costs = [
        cost(places, offsets, assign_samples(places, offsets, 300, first, low, high, budget))
        for budget in (0, 20_000, 400_000)
    ]
    assert costs[0] == cost(places, offsets, first) > costs[1] > costs[2]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"places_T": torch.tensor([0, 9])}, IndexError),
        ({"first_B": torch.tensor([0, 2])}, IndexError),
        ({"offsets_B1": torch.tensor([0, 1])}, ValueError),
        ({"high_M": torch.tensor([5])}, ValueError),
        ({"places_T": torch.tensor([0.0, 1.0])}, TypeError),
        ({"backend": "triton"}, ValueError),
    ],
)
def test_wrong_operands_are_refused(change, error):
    operands = {
        "places_T": torch.tensor([0, 1]),
        "offsets_B1": torch.tensor([0, 1, 2]),
        "num_keys": 2,
        "first_B": torch.tensor([0, 1]),
    }
    operands |= {"low_M": torch.tensor([0, 0]), "high_M": torch.tensor([2, 2]), "budget": 10}
    assert assign_samples(**operands).numel() == 2
    with pytest.raises(error):
        assign_samples(**{**operands, **change})
