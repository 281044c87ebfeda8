"""How often a step reads rows that the steps just before it updated: where staleness can matter.

The delay term of the convergence bound grows with alpha, the chance that two steps touch the same
row. Here it is counted on the very batches and negatives of a run: the mean share of a step's
distinct keys (and of all its reads, repeats included) that one of the `back` steps before it
updated, and the share of steps in which this happens to the hottest key. Touch this when a step
reads other keys.
"""

from collections import deque
from typing import Any

import torch

from slipstream.data.sampler import TrainingSampler
from slipstream.data.store import SequenceStore
from slipstream.training.recipe import Recipe
from slipstream.training.recommender import Recommender

BACK = (1, 2, 4)
MOST_STEPS = 100  # counted; more would not change the second digit


def collision_rates(
    recipe: Recipe, store: SequenceStore, steps: int = MOST_STEPS
) -> dict[str, dict[str, Any]]:
    """Return per table the shares of `keys` and `reads` that were updated, by steps back.

    `hottest` is about one step back; `distinct` counts the distinct keys of a step.
    """
    recommender = Recommender.build(recipe, store)
    sampler = TrainingSampler(
        store, recipe.sampler, seed=recipe.seed, split=recipe.split, task=recipe.task
    )
    seen: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for step in range(min(steps, recipe.train.epochs * sampler.steps_per_epoch)):
        for name, lists in recommender.plan_step(sampler.next_batch(), step).key_lists().items():
            seen.setdefault(name, []).append(
                torch.cat([keys.flatten() for keys in lists]).unique(return_counts=True)
            )
    return {
        name: _of_table(keys, recommender.features.table_sizes()[name])
        for name, keys in seen.items()
    }


def _of_table(steps: list[tuple[torch.Tensor, torch.Tensor]], rows: int) -> dict[str, Any]:
    before: deque[torch.Tensor] = deque(maxlen=max(BACK))
    shares: dict[str, dict[int, list[float]]] = {
        kind: {back: [] for back in BACK} for kind in ("keys", "reads")
    }
    together_N = torch.zeros(rows, dtype=torch.int64)
    for keys_U, counts_U in steps:
        for back in BACK:
            if len(before) >= back:
                moved_U = torch.isin(keys_U, torch.cat(list(before)[-back:]))
                shares["keys"][back].append(float(moved_U.double().mean()))
                shares["reads"][back].append(float(counts_U[moved_U].sum()) / float(counts_U.sum()))
                if back == 1:
                    together_N[keys_U[moved_U]] += 1
        before.append(keys_U)
    means = {
        kind: {str(back): sum(found) / len(found) for back, found in by_back.items() if found}
        for kind, by_back in shares.items()
    }
    hottest = float(together_N.max()) / max(len(steps) - 1, 1)
    return {
        **means,
        "hottest": hottest,
        "distinct": sum(keys.numel() for keys, _ in steps) / max(len(steps), 1),
    }
