"""Cuts windows out of the mapped store: the one place where a `JaggedBatch` is made.

Everything is a handful of vectorised gathers over the mapping; no loop over users, no padding.
Touch this when a batch gets another column; which behaviours are held out is in `splits.py`.
"""

from typing import Literal

import numpy as np
import torch

from slipstream.data.batch import JaggedBatch
from slipstream.data.store import SequenceStore

Task = Literal["retrieval", "ranking"]


def cut_windows(
    store: SequenceStore,
    users_B: np.ndarray,
    begins_B: np.ndarray,
    ends_B: np.ndarray,
    known_B: np.ndarray,
    asked_from_B: np.ndarray,
    task: Task,
) -> JaggedBatch:
    """Lay behaviours `begins_B[b]:ends_B[b]` of each user end to end, as tokens.

    Places count within the user's log. Behaviours from place `known_B[b]` on are not to be seen,
    not even as the next item of a token. `supervised_T` marks the tokens that ask for a behaviour
    at place `asked_from_B[b]` or later: the next one for retrieval, the own one for ranking.
    """
    lengths_B = ends_B - begins_B
    offsets_B1 = np.zeros(users_B.size + 1, dtype=np.int64)
    np.cumsum(lengths_B, out=offsets_B1[1:])
    place_T = np.arange(offsets_B1[-1]) + np.repeat(begins_B - offsets_B1[:-1], lengths_B)
    source_T = place_T + np.repeat(store.offsets_U1[users_B], lengths_B)
    has_next_T = place_T + 1 < np.repeat(known_B, lengths_B)
    next_T = source_T + has_next_T
    asked_T = place_T + 1 if task == "retrieval" else place_T
    supervised_T = asked_T >= np.repeat(asked_from_B, lengths_B)
    if task == "retrieval":
        supervised_T &= has_next_T
    next_items_T = store.items_N[next_T]
    next_items_T[~has_next_T] = -1
    tensor = torch.from_numpy
    return JaggedBatch(
        sample_ids_B=tensor(users_B.astype(np.int64)),
        first_positions_B=tensor(begins_B.astype(np.int64)),
        offsets_B1=tensor(offsets_B1),
        items_T=tensor(store.items_N[source_T]),
        timestamps_T=tensor(store.timestamps_N[source_T]),
        next_items_T=tensor(next_items_T),
        next_timestamps_T=tensor(store.timestamps_N[next_T]),
        supervised_T=tensor(supervised_T),
        actions={name: tensor(values_N[source_T]) for name, values_N in store.actions.items()},
        context={
            name: tensor(each.codes[source_T].astype(np.int64))
            for name, each in store.context.items()
        },
        user_features={
            name: tensor(feature.codes[users_B])
            for name, feature in store.user_features.items()
            if feature.kind == "category"
        },
    )
