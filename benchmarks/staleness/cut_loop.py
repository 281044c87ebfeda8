"""The plain loop over a cut batch, written by hand: the oracle of schedules with micro-batches.

Every micro-batch reads the same rows, gradients add up in the micro-batches' order, and one update
ends the step. No buffers, no lanes, no schedule. A schedule with the same cut has to end with the
same bits. Touch this only when a step computes something else.
"""

import torch

from slipstream.data.sampler import TrainingSampler
from slipstream.data.store import SequenceStore
from slipstream.pipeline.clustering import cluster_samples
from slipstream.training.loop import total_steps
from slipstream.training.optimizers import make_adamw, schedule_factor, step_dense
from slipstream.training.recipe import Recipe
from slipstream.training.recommender import Recommender


def train_plain_cut(
    recipe: Recipe, store: SequenceStore
) -> tuple[Recommender, torch.optim.AdamW, list[float]]:
    """Train `recipe` to its end; returns the recommender and the mean loss of every step."""
    assert isinstance(recipe.train.micro_batches, int)
    recommender = Recommender.build(recipe, store)
    optimizer = make_adamw(recommender.model, recipe.optimizer)
    sampler = TrainingSampler(
        store, recipe.sampler, seed=recipe.seed, split=recipe.split, task=recipe.task
    )
    steps, losses = total_steps(recipe, sampler.steps_per_epoch), []
    for step in range(steps):
        batch = sampler.next_batch()
        parts = [
            batch.take(users_C)
            for users_C in cluster_samples(
                batch.items_T, batch.offsets_B1, recipe.train.micro_batches
            )
        ]
        read = [
            recommender.read(recommender.plan_step(part, step)) for part in parts if part.num_users
        ]
        count = max(sum(each.plan.count for each in read), 1)
        summed = torch.zeros(())
        for each in read:
            loss = recommender.loss(each)
            (loss / count).backward()
            summed = summed + loss.detach()
        factor = schedule_factor(recipe.optimizer, step, steps)
        recommender.tables.apply([each.lookups for each in read], recipe.tables.lr * factor)
        step_dense(
            optimizer, recommender.model, recipe.optimizer.lr * factor, recipe.optimizer.clip_norm
        )
        losses.append(float(summed) / count)
    return recommender, optimizer, losses
