"""The padded baseline computes what the jagged step computes, and learns."""

import pytest
import torch

from slipstream.bench.padded_baseline import PaddedBatch, PaddedHSTU, PaddedStep
from slipstream.bench.step_samples import JaggedStep, batch_of
from slipstream.training.recipe import Recipe
from tests.support.step_recipes import small_recipe

ITEMS = 40
LENGTHS = [1, 7, 12, 3]


def pair(recipe: Recipe) -> tuple[JaggedStep, PaddedHSTU]:
    ours, padded = JaggedStep.of(recipe, ITEMS), PaddedHSTU(recipe, ITEMS)
    padded.copy_weights(ours.recommender)
    return ours, padded


@pytest.mark.parametrize("loss_at", ["all", "real"])
@pytest.mark.parametrize("time_bias", ["next", "own"])
def test_the_padded_baseline_computes_the_same_loss_and_gradients(loss_at, time_bias):
    ours, padded = pair(small_recipe(model__time_bias=time_bias))
    batch = batch_of(LENGTHS, ITEMS, seed=3)
    inputs = ours.recommender.read(ours.recommender.plan_step(batch, 0))
    loss = ours.recommender.loss(inputs)
    loss.backward()
    assert inputs.plan.count == sum(LENGTHS)
    rectangles = PaddedBatch.of(batch, 12)
    negatives_BNR = torch.zeros(4, 12, 6, dtype=torch.int64)
    negatives_BNR[rectangles.valid_BN] = inputs.plan.negatives
    theirs = padded.loss_sum(rectangles, negatives_BNR, loss_at)
    theirs.backward()
    assert theirs.item() == pytest.approx(loss.item(), rel=1e-5)
    block, layer = padded.blocks[1], ours.recommender.model.backbone.layers[1]
    torch.testing.assert_close(block.uvqk_DF.grad.T, layer.uvqk_FD.grad, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(block.time_W.grad, layer.relative.time_W.grad, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(
        padded.items.weight.grad, inputs.lookups["item"].rows_UD.grad, rtol=1e-3, atol=1e-4
    )


def test_both_steps_learn():
    recipe, batch = (
        small_recipe(loss__temperature=0.5, optimizer__lr=0.01, tables__lr=0.01),
        batch_of([12] * 6, ITEMS),
    )
    ours, padded, rectangles = (
        JaggedStep.of(recipe, ITEMS),
        PaddedStep(recipe, ITEMS),
        PaddedBatch.of(batch, 12),
    )
    our_losses = [ours(batch) for _ in range(30)]
    padded_losses = [padded(rectangles) / 72 for _ in range(30)]
    assert our_losses[0] > 1.2 * our_losses[-1]
    assert padded_losses[0] > 1.2 * padded_losses[-1]
