"""Draws negatives by name, not by state, so that any cut of a batch draws the same.

Item r of token t at step s is a pure function of (seed, s, token name, r): micro-batches, ranks and
resumed runs draw the very same negatives. `uniform` draws every item alike; `popularity` draws by
(a power of) how often an item occurs in the training part, through Walker's alias method with
integer thresholds, and knows the logarithm of each item's probability for the logQ correction.
`in_batch` draws from the targets of the global batch, most of whose rows are looked up anyway;
`mixed` draws a share there and the rest from the whole catalogue, so that items nobody chose are
pushed down too. Each part of a batch carries these targets, so the draws do not depend on how the
batch is cut or shared over ranks. Touch this to draw negatives in another way.
"""

import numpy as np
import torch

from slipstream.ops.counter_random import derive_seed
from slipstream.ops.item_draws import draw_items
from slipstream.training.recipe_sections import LossConfig


class UniformNegatives:
    """Every item alike; log_q is a constant and cancels in the softmax, so there is none."""

    log_q_N: torch.Tensor | None = None

    def __init__(self, num_items: int) -> None:
        self.num_items = num_items

    def draw(
        self, seed: int, names_X: torch.Tensor, count: int, targets_S: torch.Tensor
    ) -> torch.Tensor:
        """Draw int64 [X, count]: negatives for each name, perhaps from `targets_S`."""
        return draw_items(seed, names_X, count, self.num_items)


class PopularityNegatives(UniformNegatives):
    """Items by weight, O(1) a draw."""

    def __init__(self, weights_N: np.ndarray) -> None:
        super().__init__(len(weights_N))
        share_N = np.asarray(weights_N, dtype=np.float64)
        if (
            len(share_N) == 0
            or not np.all(np.isfinite(share_N))
            or share_N.min() < 0
            or share_N.sum() <= 0
        ):
            raise ValueError("popularity weights must be finite, not negative, and not all zero")
        share_N = share_N / share_N.sum()
        threshold_N, alias_N = alias_table(share_N)
        self.threshold_N, self.alias_N = torch.from_numpy(threshold_N), torch.from_numpy(alias_N)
        with np.errstate(divide="ignore"):
            self.log_q_N = torch.from_numpy(np.log(share_N))

    def draw(
        self, seed: int, names_X: torch.Tensor, count: int, targets_S: torch.Tensor
    ) -> torch.Tensor:
        return draw_items(
            seed, names_X, count, self.num_items, threshold_N=self.threshold_N, alias_N=self.alias_N
        )


class BatchNegatives(UniformNegatives):
    """A share of the draws from the global batch's targets, the others uniform.

    With `mixed_share` 1 all draws are from the batch. A target occurs in a batch about as often as
    in training, so q is that mixture: share * frequency + (1 - share) / items.
    """

    def __init__(self, counts_N: np.ndarray, mixed_share: float = 1.0) -> None:
        super().__init__(len(counts_N))
        if not 0 < mixed_share <= 1:
            raise ValueError(
                "the share of negatives from the batch must be above 0 and at most 1, got "
                f"{mixed_share}"
            )
        self.mixed_share = mixed_share
        frequency_N = np.clip(np.asarray(counts_N, dtype=np.float64), 1.0, None)
        frequency_N /= frequency_N.sum()
        self.log_q_N = torch.from_numpy(
            np.log(mixed_share * frequency_N + (1.0 - mixed_share) / self.num_items)
        )

    def draw(
        self, seed: int, names_X: torch.Tensor, count: int, targets_S: torch.Tensor
    ) -> torch.Tensor:
        from_batch = max(1, round(count * self.mixed_share)) if targets_S.numel() else 0
        parts = []
        if from_batch:
            parts.append(
                targets_S[draw_items(derive_seed(seed, 1), names_X, from_batch, targets_S.numel())]
            )
        if count > from_batch:
            parts.append(
                draw_items(derive_seed(seed, 2), names_X, count - from_batch, self.num_items)
            )
        return torch.cat(parts, dim=1)


def make_negatives(config: LossConfig, counts_N: np.ndarray) -> UniformNegatives:
    """Make the sampler a recipe asks for; `counts_N` are the items' counts in training."""
    if config.sampling == "popularity":
        return PopularityNegatives(counts_N.clip(min=1) ** config.popularity_power)
    if config.sampling in ("in_batch", "mixed"):
        return BatchNegatives(counts_N, config.mixed_share if config.sampling == "mixed" else 1.0)
    return UniformNegatives(len(counts_N))


def alias_table(share_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Build Walker's alias table.

    Column n yields n when 32 random bits are below threshold[n], otherwise alias[n].
    """
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


def training_counts(
    items_N: np.ndarray, offsets_U1: np.ndarray, num_items: int, train_lengths_U: np.ndarray
) -> np.ndarray:
    """Count each item among the first `train_lengths_U` behaviours of each user."""
    in_training_N = training_behaviours(offsets_U1, train_lengths_U)
    return np.bincount(items_N[in_training_N], minlength=num_items)


def training_behaviours(offsets_U1: np.ndarray, train_lengths_U: np.ndarray) -> np.ndarray:
    """Mark the first `train_lengths_U` behaviours of each user (bool, one per behaviour)."""
    steps = np.zeros(int(offsets_U1[-1]) + 1, dtype=np.int64)
    np.add.at(steps, offsets_U1[:-1], 1)
    np.add.at(steps, offsets_U1[:-1] + train_lengths_U, -1)
    return np.cumsum(steps[:-1]) > 0
