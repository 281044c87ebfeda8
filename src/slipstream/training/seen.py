"""What a user had seen before a question: the one definition for evaluation and recommendation.

Seen is every item of the user's whole log before the question, not only of the model's window.
Touch this when the meaning of `repeat` changes.
"""

from typing import NamedTuple

import numpy as np
import torch

from slipstream.data.store import SequenceStore


class SeenPairs(NamedTuple):
    """Pairs of a query and an item its user had seen; each pair once."""

    rows_P: torch.Tensor  # int64, place of the query
    items_P: torch.Tensor  # int64, row of the item

    def contains(self, items_S: torch.Tensor) -> torch.Tensor:
        """Return bool [S]: whether query s had seen item `items_S[s]`."""
        seen_S = torch.zeros(items_S.numel(), dtype=torch.bool)
        seen_S[self.rows_P[self.items_P == items_S[self.rows_P]]] = True
        return seen_S


def seen_pairs(store: SequenceStore, users_S: torch.Tensor, known_S: torch.Tensor) -> SeenPairs:
    """Return the items among the first `known_S[s]` behaviours of the log of user `users_S[s]`."""
    known = known_S.numpy()
    row_P = np.repeat(np.arange(known.size), known)
    place_P = np.arange(row_P.size) - np.repeat(np.cumsum(known) - known, known)
    items_P = store.items_N[store.offsets_U1[users_S.numpy()[row_P]] + place_P]
    distinct_P = np.unique(row_P * store.num_items + items_P)
    row_P, item_P = np.divmod(distinct_P, store.num_items)
    return SeenPairs(torch.from_numpy(row_P), torch.from_numpy(item_P))
