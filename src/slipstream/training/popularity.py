"""Popular items: the baseline of recommending by training counts alone, and what a bundle carries.

Items are ordered by how often they stand in training, ties by row. Touch this when a model should
be compared with another simple rule, or users without a history be answered by another one.
"""

import numpy as np
import torch

from slipstream.data.store import SequenceStore
from slipstream.training.metrics import MISSED
from slipstream.training.negatives import training_behaviours, training_counts
from slipstream.training.recipe import Recipe
from slipstream.training.seen import SeenPairs

BASELINE = "popularity "  # begins the name of each figure of the baseline
POPULAR_DAYS = (1, 7, 30)  # windows before the last behaviour of training
MOST_POPULAR = 10_000  # items kept of each window
_AT_ONCE = 1 << 20  # behaviours counted at once
_DAY = 86_400


def item_counts(store: SequenceStore, recipe: Recipe) -> torch.Tensor:
    """Return how often each item stands in training (int64 [N])."""
    train_lengths_U = recipe.split.train_lengths(store)
    counts_N = training_counts(store.items_N, store.offsets_U1, store.num_items, train_lengths_U)
    return torch.from_numpy(counts_N)


def popular_items(store: SequenceStore, recipe: Recipe) -> dict[str, torch.Tensor]:
    """Return the most frequent items of training and their counts, by window of days.

    Window 0 is the whole log; a log without times has only that one.
    """
    in_training_N = training_behaviours(store.offsets_U1, recipe.split.train_lengths(store))
    parts = [slice(at, at + _AT_ONCE) for at in range(0, len(in_training_N), _AT_ONCE)]
    timed = bool(store.meta.get("timed", True))
    lasts = [store.timestamps_N[part][in_training_N[part]].max(initial=0) for part in parts]
    last = int(max(lasts, default=0)) if timed else 0
    found = {}
    for days in (0, *(POPULAR_DAYS if timed else ())):
        counts_N = np.zeros(store.num_items, dtype=np.int64)
        for part in parts:
            counted = in_training_N[part]
            if days:
                counted = counted & (store.timestamps_N[part] > last - days * _DAY)
            np.add.at(counts_N, store.items_N[part][counted], 1)
        most = min(MOST_POPULAR, store.num_items)
        least = max(1, int(np.partition(counts_N, -most)[-most]))
        best = np.flatnonzero(counts_N >= least)
        best = best[np.argsort(-counts_N[best], kind="stable")][:most]
        found[f"popular/{days}/rows"] = torch.from_numpy(best)
        found[f"popular/{days}/counts"] = torch.from_numpy(counts_N[best])
    return found


class PopularityOrder:
    """The catalogue in order of training counts, most frequent first."""

    def __init__(self, counts_N: torch.Tensor) -> None:
        order_N = counts_N.argsort(descending=True, stable=True)
        self._place_N = torch.empty_like(order_N)
        self._place_N[order_N] = torch.arange(order_N.numel())

    def items_above(self, targets_S: torch.Tensor, seen: SeenPairs | None = None) -> torch.Tensor:
        """Count the items before each target that its user has not seen; a seen one is MISSED."""
        above_S = self._place_N[targets_S]
        if seen is None:
            return above_S
        before_P = self._place_N[seen.items_P] < above_S[seen.rows_P]
        seen_above_S = torch.bincount(seen.rows_P[before_P], minlength=targets_S.numel())
        return (above_S - seen_above_S).masked_fill(seen.contains(targets_S), MISSED)


def action_rates(store: SequenceStore, recipe: Recipe) -> torch.Tensor:
    """Return each item's mean label of every ranking task in training (float64 [N, A]).

    An item without training behaviours has the mean over all of them.
    """
    in_training_N = training_behaviours(store.offsets_U1, recipe.split.train_lengths(store))
    items = store.items_N[in_training_N]
    counts_N = np.bincount(items, minlength=store.num_items)
    columns = []
    for task in recipe.tasks.values():
        labels = store.actions[task.column][in_training_N] >= task.threshold
        sums_N = np.bincount(items, weights=labels, minlength=store.num_items)
        base = float(labels.mean()) if labels.size else 0.0
        columns.append(np.where(counts_N > 0, sums_N / np.maximum(counts_N, 1), base))
    return torch.from_numpy(np.stack(columns, axis=1))
