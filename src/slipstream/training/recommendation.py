"""Recommends items to one user: the catalogue's best given the whole log, without what was seen.

Touch this to change what `slipstream recommend` answers.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from slipstream.data.batch import JaggedBatch
from slipstream.data.store import SequenceStore
from slipstream.data.windows import cut_windows
from slipstream.training.recommender import Recommender

CANDIDATE_TILE = 2048  # candidates ranked at once


@dataclass(frozen=True)
class Recommendation:
    """Items for one user, best first, and the behaviours the model saw, oldest first."""

    user: int
    items: list[int]
    scores: list[float]
    history: list[int]


def whole_log(recommender: Recommender, store: SequenceStore, user: int) -> JaggedBatch:
    """Return a user's newest behaviours, held-out ones included; the last asks for the next."""
    length = np.array([store.lengths_U[user]])
    begin = np.maximum(0, length - recommender.recipe.sampler.max_len)
    batch = cut_windows(
        store, np.array([user]), begin, length, length, length, recommender.recipe.task
    )
    last_T = torch.zeros(batch.num_tokens, dtype=torch.bool)
    last_T[-1] = True
    return replace(batch, supervised_T=last_T)


@torch.no_grad()
def recommend(
    recommender: Recommender, store: SequenceStore, user: int, count: int = 10
) -> Recommendation:
    """The `count` best unseen items for a user (a row of the store's user vocabulary)."""
    batch = whole_log(recommender, store, user)
    if recommender.recipe.task == "ranking":
        scores_N = _ranking_scores(recommender, batch)
    else:
        scores_N = (recommender.queries_SD(batch) @ recommender.catalogue_ND().T)[0]
    start, end = int(store.offsets_U1[user]), int(store.offsets_U1[user + 1])
    scores_N[torch.from_numpy(store.items_N[start:end].copy())] = -torch.inf
    unseen = int(torch.isfinite(scores_N).sum())
    best = scores_N.topk(min(count, unseen))
    return Recommendation(user, best.indices.tolist(), best.values.tolist(), batch.items_T.tolist())


def _ranking_scores(recommender: Recommender, history: JaggedBatch) -> torch.Tensor:
    """Return the first task's probability for every item, each a candidate after the history."""
    parts = []
    for items in torch.arange(recommender.features.num_items).split(CANDIDATE_TILE):
        count = items.numel()
        now = history.timestamps_T[-1:].expand(count)
        batch = replace(
            history,
            offsets_B1=torch.tensor([0, history.num_tokens + count]),
            items_T=torch.cat([history.items_T, items]),
            timestamps_T=torch.cat([history.timestamps_T, now]),
            next_items_T=torch.cat([history.next_items_T, torch.full((count,), -1)]),
            next_timestamps_T=torch.cat([history.next_timestamps_T, now]),
            supervised_T=torch.arange(history.num_tokens + count) >= history.num_tokens,
            actions={
                name: torch.cat([values, torch.zeros(count)])
                for name, values in history.actions.items()
            },
        )
        parts.append(recommender.predict_SA(batch, torch.tensor([count]))[:, 0])
    return torch.cat(parts)
