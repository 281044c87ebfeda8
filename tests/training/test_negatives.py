"""Negatives and losses: by name, by the right odds, and equal to what the formulas say."""

import numpy as np
import pytest
import torch

from slipstream.ops import native
from slipstream.ops.counter_random import random_integers
from slipstream.ops.item_draws import draw_items
from slipstream.training.negatives import (
    BatchNegatives,
    PopularityNegatives,
    UniformNegatives,
    alias_table,
    training_counts,
)

TOKENS = torch.tensor([5, 2**40 + 3, 17, 0, -1])


def test_negatives_hang_on_names_not_on_company():
    for sampler in (UniformNegatives(100), PopularityNegatives(np.arange(1, 101))):
        drawn = sampler.draw(9, TOKENS, 70, TOKENS)
        alone = torch.cat([sampler.draw(9, TOKENS[t : t + 1], 70, TOKENS) for t in range(5)])
        assert torch.equal(drawn, alone)
        assert torch.equal(drawn[:, :13], sampler.draw(9, TOKENS, 13, TOKENS))
        assert not torch.equal(drawn, sampler.draw(10, TOKENS, 70, TOKENS))
        assert drawn.min() >= 0 and drawn.max() < 100


@pytest.mark.skipif(not native.available(), reason="native kernels are not built")
@pytest.mark.parametrize("below", [1, 2, 3416, 2**31])
def test_native_draws_equal_the_reference(below):
    uniform = [
        draw_items(3, TOKENS, 33, below, backend=backend) for backend in ("native", "reference")
    ]
    assert torch.equal(*uniform)
    assert torch.equal(uniform[0], random_integers(3, TOKENS, 33, below))
    if below < 10_000:
        threshold, alias = (
            torch.from_numpy(x)
            for x in alias_table(np.arange(1, below + 1) / (below * (below + 1) / 2))
        )
        drawn = [
            draw_items(3, TOKENS, 33, below, threshold_N=threshold, alias_N=alias, backend=b)
            for b in ("native", "reference")
        ]
        assert torch.equal(*drawn)


def test_alias_table_holds_the_exact_odds():
    share = np.random.default_rng(0).random(57) ** 3
    share[4] = 0.0
    share /= share.sum()
    threshold, alias = alias_table(share)
    odds = threshold / 2**32
    np.add.at(odds, alias, 1 - threshold / 2**32)
    assert np.abs(odds / 57 - share).max() < 1e-9
    drawn = PopularityNegatives(share).draw(1, torch.arange(20_000), 10, TOKENS)
    seen = torch.bincount(drawn.flatten(), minlength=57).double() / 200_000
    assert np.abs(seen.numpy() - share).max() < 4e-3 and seen[4] == 0


def test_popularity_counts_only_what_trains():
    counts = training_counts(
        np.array([1, 1, 2, 0, 3, 3]), np.array([0, 3, 3, 6]), 5, np.array([2, 0, 1])
    )
    assert counts.tolist() == [1, 2, 0, 0, 0]
    assert torch.allclose(
        PopularityNegatives(np.array([1.0, 3.0])).log_q_N,
        torch.tensor([0.25, 0.75], dtype=torch.float64).log(),
    )


def test_wrong_draws_are_refused():
    with pytest.raises(ValueError, match="both or neither"):
        draw_items(0, TOKENS, 3, 5, alias_N=torch.arange(5))
    with pytest.raises(ValueError, match="between 1 and 2\\^31"):
        draw_items(0, TOKENS, 3, 0)
    with pytest.raises(TypeError, match="int64"):
        draw_items(0, TOKENS.float(), 3, 5)
    with pytest.raises(ValueError, match="not all zero"):
        PopularityNegatives(np.zeros(3))
    with pytest.raises(ValueError, match="contiguous int64"):
        draw_items(
            0, TOKENS, 3, 5, threshold_N=torch.zeros(4, dtype=torch.int64), alias_N=torch.arange(5)
        )


def test_negatives_from_the_batch_are_its_targets_and_mixed_ones_partly():
    counts, targets = np.array([5, 1, 0, 9, 5, 0, 2, 3]), torch.tensor([3, 3, 0, 6])
    drawn = BatchNegatives(counts).draw(2, TOKENS, 200, targets)
    assert set(drawn.unique().tolist()) == {0, 3, 6}
    share = (drawn == 3).double().mean()
    assert abs(float(share) - 0.5) < 0.05  # as often as it stands there
    mixed = BatchNegatives(counts, 0.25).draw(2, TOKENS, 200, targets)
    assert set(mixed[:, :50].unique().tolist()) == {0, 3, 6} and set(
        mixed[:, 50:].unique().tolist()
    ) == set(range(8))
    assert torch.equal(
        mixed,
        torch.cat(
            [
                BatchNegatives(counts, 0.25).draw(2, TOKENS[t : t + 1], 200, targets)
                for t in range(5)
            ]
        ),
    )
    assert BatchNegatives(counts).draw(2, TOKENS[:0], 200, targets[:0]).shape == (0, 200)


def test_the_correction_of_mixed_draws_is_their_mixture():
    counts = np.array([4, 0, 12, 4])
    frequency = np.array([4, 1, 12, 4]) / 21
    assert np.allclose(BatchNegatives(counts).log_q_N.exp(), frequency)
    assert np.allclose(BatchNegatives(counts, 0.3).log_q_N.exp(), 0.3 * frequency + 0.7 / 4)
    assert np.isclose(float(BatchNegatives(counts, 0.3).log_q_N.exp().sum()), 1.0)
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        BatchNegatives(counts, 1.5)
