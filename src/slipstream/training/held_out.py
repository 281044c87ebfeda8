"""The held-out behaviours of a split, and what is known of them without any model.

That is: how many are repeats, how many are cold, and what popularity alone would reach. Touch this
when an evaluation should say more about its data.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from slipstream.data.splits import Which
from slipstream.data.store import SequenceStore
from slipstream.training.metrics import RankingMetrics
from slipstream.training.popularity import BASELINE, PopularityOrder, item_counts
from slipstream.training.ranks import ALONE, Ranks
from slipstream.training.recipe import Recipe
from slipstream.training.seen import seen_pairs

TILE = 4096  # behaviours whose users' logs are read at once


@dataclass(frozen=True)
class HeldOut:
    """Held-out behaviours in store order, a user's earlier ones first (int64 [S] each)."""

    users_S: torch.Tensor  # row of the user
    known_S: torch.Tensor  # how many behaviours of the user's log come before it
    items_S: torch.Tensor  # row of its item
    times_S: torch.Tensor  # seconds

    def __len__(self) -> int:
        return self.users_S.numel()

    def part(self, places: slice) -> "HeldOut":
        """Return some of them."""
        return HeldOut(
            self.users_S[places], self.known_S[places], self.items_S[places], self.times_S[places]
        )

    def tiles(self, ranks: Ranks = ALONE) -> Iterator["HeldOut"]:
        """Yield this rank's tiles."""
        for start in range(ranks.rank * TILE, len(self), ranks.world * TILE):
            yield self.part(slice(start, start + TILE))


def held_out_behaviours(store: SequenceStore, recipe: Recipe, which: Which) -> HeldOut:
    """Return the behaviours that a split holds out of a store."""
    begins_U, ends_U = recipe.split.held_out(store, which)
    counts_U = ends_U - begins_U
    users_S = np.repeat(np.arange(counts_U.size), counts_U)
    before_U = np.cumsum(counts_U) - counts_U
    known_S = np.arange(users_S.size) + np.repeat(begins_U - before_U, counts_U)
    places_S = store.offsets_U1[users_S] + known_S
    tensor = torch.from_numpy
    return HeldOut(
        tensor(users_S.astype(np.int64)),
        tensor(known_S.astype(np.int64)),
        tensor(store.items_N[places_S]),
        tensor(store.timestamps_N[places_S]),
    )


def untrained_users(store: SequenceStore, recipe: Recipe) -> torch.Tensor:
    """Return bool [U]: the users of whom nothing trains, or too little."""
    tokens_U = recipe.split.train_lengths(store) - (recipe.task == "retrieval")
    return torch.from_numpy(tokens_U < recipe.sampler.min_len)


def describe_held_out(
    store: SequenceStore, recipe: Recipe, which: Which, ranks: Ranks = ALONE
) -> dict[str, float]:
    """Return the shares of repeats, cold users and cold items, and the popularity baseline.

    The baseline follows the recipe's `repeat` rule; a ranking recipe has another one, computed
    where its labels are. Collective.
    """
    held_out, counts_N = held_out_behaviours(store, recipe, which), item_counts(store, recipe)
    untrained_U, order = untrained_users(store, recipe), PopularityOrder(counts_N)
    baseline = RankingMetrics()
    repeats = cold_users = cold_items = 0
    for tile in held_out.tiles(ranks):
        seen = seen_pairs(store, tile.users_S, tile.known_S)
        repeats += int(seen.contains(tile.items_S).sum())
        cold_users += int(untrained_U[tile.users_S].sum())
        cold_items += int((counts_N[tile.items_S] == 0).sum())
        above_S = order.items_above(tile.items_S, seen if recipe.repeat == "exclude" else None)
        baseline.add(above_S, torch.zeros_like(above_S))
    sums = ranks.sum([repeats, cold_users, cold_items, *baseline.sums()])
    baseline.take_over(sums[3:])
    shares = dict(zip(("repeats", "cold_users", "cold_items"), sums, strict=False))
    figures = {name: value / max(len(held_out), 1) for name, value in shares.items()}
    if recipe.task == "retrieval":
        figures |= {f"{BASELINE}{name}": value for name, value in baseline.result().items()}
    return figures
