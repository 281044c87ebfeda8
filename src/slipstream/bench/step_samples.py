"""Recommenders and batches for benchmarks of whole training steps, made in memory from a seed.

Touch this when a step needs more than items and times.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from slipstream.data.batch import JaggedBatch
from slipstream.training.features import Features
from slipstream.training.loop import train_step
from slipstream.training.optimizers import make_adamw
from slipstream.training.own_functions import LossFunction, OwnFunctions
from slipstream.training.recipe import Recipe
from slipstream.training.recommender import Recommender

START = 1_600_000_000
FOLLOWS = 0.7  # share of behaviours that follow from the one before, so that steps can learn


def batch_of(
    lengths: Sequence[int], num_items: int, seed: int = 0, first_user: int = 0
) -> JaggedBatch:
    """Make one window per length: items often follow from the last, gaps are lognormal."""
    rng = np.random.default_rng(seed)
    offsets_B1 = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    logs, times = [], []
    for length in lengths:
        fresh = rng.integers(0, num_items, length + 1)
        follows = rng.random(length + 1) < FOLLOWS
        log = fresh.tolist()
        for place in range(1, length + 1):
            if follows[place]:
                log[place] = (log[place - 1] * 3 + 1) % num_items
        logs.append(np.array(log, dtype=np.int64))
        times.append(
            START + np.cumsum(np.rint(rng.lognormal(6.0, 3.0, length + 1)).astype(np.int64))
        )

    def joined(parts: list[np.ndarray], part: slice) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([log[part] for log in parts]))

    before, after = slice(0, -1), slice(1, None)
    return JaggedBatch(
        sample_ids_B=torch.arange(first_user, first_user + len(lengths)),
        first_positions_B=torch.zeros(len(lengths), dtype=torch.int64),
        offsets_B1=torch.from_numpy(offsets_B1),
        items_T=joined(logs, before),
        timestamps_T=joined(times, before),
        next_items_T=joined(logs, after),
        next_timestamps_T=joined(times, after),
        supervised_T=torch.ones(int(offsets_B1[-1]), dtype=torch.bool),
    )


def movielens_like_lengths(users: int, seed: int = 0) -> np.ndarray:
    """Draw lengths with MovieLens-1M's median (96), mean (166), least and most (20, 2,314)."""
    drawn = np.random.default_rng(seed).lognormal(np.log(96), 1.04, users)
    return np.clip(np.rint(drawn), 20, 2314).astype(np.int64)


@dataclass
class JaggedStep:
    """`train_step` on a recommender of its own, counting its steps."""

    recommender: Recommender
    steps_done: int = 0

    @classmethod
    def of(cls, recipe: Recipe, num_items: int, loss: LossFunction | None = None) -> "JaggedStep":
        """Make a step of a new recommender, with a caller's own loss where one is given."""
        recommender, own = Recommender(recipe, Features(num_items)), OwnFunctions(loss=loss)
        own.check(recipe)
        if loss is not None:
            recommender.loss_per_token = own.loss_per_token
        return cls(recommender)

    def __post_init__(self) -> None:
        self.optimizer = make_adamw(self.recommender.model, self.recommender.recipe.optimizer)

    def __call__(self, batch: JaggedBatch) -> float:
        """One step; the mean loss before it."""
        result = train_step(self.recommender, self.optimizer, batch, self.steps_done, 1_000_000)
        self.steps_done += 1
        return result.loss_sum / max(result.count, 1)
