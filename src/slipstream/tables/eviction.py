"""Chooses which rows a full cache or table gives up first. Touch this to change that choice."""

import numpy as np

# At least one entry in SHARE is evicted at a time, so that the search for them stays rare.
SHARE = 16


def smallest(count: int, *columns: np.ndarray) -> np.ndarray:
    """Find the `count` smallest entries by the first column, ties by the next, and so on.

    Returns their places. The last column must have no ties.
    """
    first = columns[0]
    if count >= len(first):
        return np.arange(len(first))
    if count == 0:
        return np.arange(0)
    border = np.partition(first, count - 1)[count - 1]
    below, tied = np.flatnonzero(first < border), np.flatnonzero(first == border)
    if len(below) + len(tied) > count:
        tied = tied[smallest(count - len(below), *(column[tied] for column in columns[1:]))]
    return np.concatenate([below, tied])
