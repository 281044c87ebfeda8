"""HR@k and NDCG@k over lists of the best items: the one function that measures everybody.

Touch it when a figure of quality is added. It takes numpy only, and Python 3.9 suffices, because
it also runs in the peers' environments.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

JUDGED_AT = 10  # validation counts the first ten answers


def list_metrics(
    top_UK: np.ndarray, targets_U: np.ndarray, at: Sequence[int] = (JUDGED_AT,)
) -> dict[str, float]:
    """Return HR@k and NDCG@k over all users with a target (0 or more); an absent item is a miss.

    The lists hold item rows, best first, then -1.
    """
    asked_A = np.flatnonzero(targets_U >= 0)
    if len(asked_A) == 0:
        raise ValueError("no user has an item to find, so there is nothing to measure")
    hits_AK = top_UK[asked_A] == targets_U[asked_A, None]
    found_A = hits_AK.any(axis=1)
    places_A = np.where(found_A, hits_AK.argmax(axis=1), np.iinfo(np.int64).max)
    figures: dict[str, float] = {}
    for k in at:
        if k > top_UK.shape[1]:
            raise ValueError(f"lists of {top_UK.shape[1]} items have no HR@{k}")
        within_A = places_A < k
        gains_A = np.where(within_A, 1.0 / np.log2(np.minimum(places_A, k) + 2.0), 0.0)
        figures[f"HR@{k}"] = float(within_A.mean())
        figures[f"NDCG@{k}"] = float(gains_A.mean())
    return figures
