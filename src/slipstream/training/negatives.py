"""Negatives by name, not by state: item r of token t at step s is a pure function of (seed, s, token name, r).

So micro-batches, ranks and resumed runs draw the very same negatives. `uniform` draws every item alike; `popularity` draws by
(a power of) how often an item occurs in the training part, through Walker's alias method with integer thresholds, and knows the
logarithm of each item's probability for the logQ correction.
"""

import numpy as np
import torch

from slipstream.ops.item_draws import draw_items


class UniformNegatives:
    """Every item alike; log_q is a constant and cancels in the softmax, so there is none."""

    log_q_N: torch.Tensor | None = None

    def __init__(self, num_items: int) -> None:
        self.num_items = num_items

    def draw(self, seed: int, token_ids_T: torch.Tensor, count: int) -> torch.Tensor:
        """int64 [T, count]: the negatives of the tokens named `token_ids_T`."""
        return draw_items(seed, token_ids_T, count, self.num_items)


class PopularityNegatives(UniformNegatives):
    """Items by weight, O(1) a draw."""

    def __init__(self, weights_N: np.ndarray) -> None:
        super().__init__(len(weights_N))
        share_N = np.asarray(weights_N, dtype=np.float64)
        if len(share_N) == 0 or not np.all(np.isfinite(share_N)) or share_N.min() < 0 or share_N.sum() <= 0:
            raise ValueError("popularity weights must be finite, not negative, and not all zero")
        share_N = share_N / share_N.sum()
        threshold_N, alias_N = alias_table(share_N)
        self.threshold_N, self.alias_N = torch.from_numpy(threshold_N), torch.from_numpy(alias_N)
        with np.errstate(divide="ignore"):
            self.log_q_N = torch.from_numpy(np.log(share_N))

    def draw(self, seed: int, token_ids_T: torch.Tensor, count: int) -> torch.Tensor:
        return draw_items(seed, token_ids_T, count, self.num_items, threshold_N=self.threshold_N, alias_N=self.alias_N)


def alias_table(share_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Walker's table: column n yields n when 32 random bits are below threshold[n], otherwise alias[n]."""
    n = len(share_N)
    load_N = share_N * n
    threshold_N, alias_N = np.full(n, 1 << 32, dtype=np.int64), np.arange(n, dtype=np.int64)
    small = [i for i in range(n) if load_N[i] < 1.0]
    large = [i for i in range(n) if load_N[i] >= 1.0]
    while small and large:
        light, heavy = small.pop(), large[-1]
        threshold_N[light], alias_N[light] = round(load_N[light] * (1 << 32)), heavy
        load_N[heavy] -= 1.0 - load_N[light]
        if load_N[heavy] < 1.0:
            small.append(large.pop())
    return threshold_N, alias_N


def training_counts(items_N: np.ndarray, offsets_U1: np.ndarray, num_items: int, train_lengths_U: np.ndarray) -> np.ndarray:
    """How often each item occurs among the first `train_lengths_U` behaviours of each user."""
    ends_U = offsets_U1[:-1] + train_lengths_U
    steps = np.zeros(len(items_N) + 1, dtype=np.int64)
    np.add.at(steps, offsets_U1[:-1], 1)
    np.add.at(steps, ends_U, -1)
    in_training_N = np.cumsum(steps[:-1]) > 0
    return np.bincount(items_N[in_training_N], minlength=num_items)
