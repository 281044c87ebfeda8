"""Which entries go first when room is needed."""

import numpy as np

SHARE = (
    16  # at least one in so many goes at a time, so that searching for the least useful stays rare
)


def smallest(count: int, *columns: np.ndarray) -> np.ndarray:
    """Places of the `count` smallest entries by the first column, ties by the next, and so on; the
    last must have no ties.
    """
    first = columns[0]
    if count >= len(first):
        return np.arange(len(first))
    if count == 0:
        return np.arange(0)
    border = np.partition(first, count - 1)[count - 1]
    sure, tied = np.flatnonzero(first < border), np.flatnonzero(first == border)
    if len(sure) + len(tied) > count:
        tied = tied[smallest(count - len(sure), *(column[tied] for column in columns[1:]))]
    return np.concatenate([sure, tied])
