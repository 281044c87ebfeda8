"""The whole-step benchmark: what it compares computes the same thing, and its figures follow from what it measured."""

import math

import pytest
import torch

from slipstream.bench import negative_memory, padded_baseline, step_samples
from slipstream.bench.padded_baseline import PaddedBatch, PaddedHSTU, PaddedStep
from slipstream.bench.step_samples import JaggedStep, batch_of
from slipstream.config import load_recipe
from slipstream.training.config import Recipe

ITEMS = 40
LENGTHS = [1, 7, 12, 3]


def small_recipe(**changes) -> Recipe:
    """The shipped recipe of the comparison, cut down; no dropout unless asked for, because the two draw masks differently."""
    settings = {"model__max_len": 12, "model__dim": 10, "model__dropout": 0.0, "model__input_dropout": 0.0, "loss__negatives": 6}
    return load_recipe(Recipe, "ml-1m-hstu", **(settings | changes))


def pair(recipe: Recipe) -> tuple[JaggedStep, PaddedHSTU]:
    ours, padded = JaggedStep.of(recipe, ITEMS), PaddedHSTU(recipe, ITEMS)
    padded.copy_weights(ours.recommender)
    return ours, padded


@pytest.mark.parametrize("loss_at", ["all", "real"])
@pytest.mark.parametrize("time_bias", ["next", "own"])
def test_the_padded_baseline_computes_the_same_loss_and_gradients(loss_at, time_bias):
    ours, padded = pair(small_recipe(model__time_bias=time_bias))
    batch = batch_of(LENGTHS, ITEMS, seed=3)
    gathered = ours.recommender.gather(batch, 0)
    loss, count = ours.recommender.loss_sum(batch, 0, gathered)
    loss.backward()
    assert count == sum(LENGTHS)
    rectangles = PaddedBatch.of(batch, 12)
    negatives_BNR = torch.zeros(4, 12, 6, dtype=torch.int64)
    negatives_BNR[rectangles.valid_BN] = gathered.negatives
    theirs = padded.loss_sum(rectangles, negatives_BNR, loss_at)
    theirs.backward()
    assert float(theirs) == pytest.approx(float(loss), rel=1e-5)
    block, layer = padded.blocks[1], ours.recommender.model.backbone.layers[1]
    torch.testing.assert_close(block.uvqk_DF.grad.T, layer.uvqk_FD.grad, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(block.time_W.grad, layer.relative.time_W.grad, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(padded.items.weight.grad, gathered.lookups["item"].rows_UD.grad, rtol=1e-3, atol=1e-4)


def test_gathering_negatives_gives_the_same_loss(monkeypatch):
    recipe, batch = small_recipe(), batch_of(LENGTHS, ITEMS, seed=4)
    ours = JaggedStep.of(recipe, ITEMS)(batch)
    kind = padded_baseline.Recipe.model_validate(recipe.model_dump()).loss.kind
    gathered = negative_memory.RetrievalLoss(negative_memory.gathered_softmax, "per_token")
    monkeypatch.setitem(negative_memory.RETRIEVAL_LOSSES, kind, gathered)
    assert JaggedStep.of(recipe, ITEMS)(batch) == pytest.approx(ours, rel=1e-5)


def test_both_steps_learn():
    recipe, batch = small_recipe(loss__temperature=0.5, optimizer__lr=0.01, tables__lr=0.01), batch_of([12] * 6, ITEMS)
    ours, padded, rectangles = JaggedStep.of(recipe, ITEMS), PaddedStep(recipe, ITEMS), PaddedBatch.of(batch, 12)
    our_losses = [ours(batch) for _ in range(30)]
    padded_losses = [padded(rectangles) / 72 for _ in range(30)]
    assert our_losses[0] > 1.2 * our_losses[-1]
    assert padded_losses[0] > 1.2 * padded_losses[-1]


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
