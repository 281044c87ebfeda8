"""The split file: what every contender trains on and is asked for, from a store.

Touch this when the arrays of the file change; peers/contest_split.py reads them. The split is
Slipstream's own: the last behaviour tests, the second last validates.
"""

from pathlib import Path

import numpy as np

from slipstream.data.splits import Split
from slipstream.data.store import SequenceStore
from slipstream.errors import SlipstreamError
from slipstream.files import atomic_file


def split_arrays(store: SequenceStore) -> dict[str, np.ndarray]:
    """Return the arrays of the split file."""
    rule = Split()
    offsets_U1 = np.asarray(store.offsets_U1, dtype=np.int64)
    lengths_U = np.diff(offsets_U1)
    users_N = np.repeat(np.arange(len(lengths_U)), lengths_U)
    places_N = np.arange(len(users_N)) - offsets_U1[users_N]
    times_N = np.asarray(store.timestamps_N, dtype=np.int64) if store.timed else places_N
    items_N = np.asarray(store.items_N, dtype=np.int64)
    train_lengths_U = np.asarray(rule.train_lengths(store), dtype=np.int64)
    asked_U = train_lengths_U < lengths_U
    if not asked_U.any():
        raise SlipstreamError(
            f"no user of {store.directory} has three behaviours, so nothing can be held out; give "
            "longer logs"
        )
    validation_U = np.minimum(offsets_U1[:-1] + train_lengths_U, len(items_N) - 1)
    test_U = np.minimum(validation_U + 1, len(items_N) - 1)
    return {
        "users_N": users_N,
        "items_N": items_N,
        "times_N": times_N,
        "offsets_U1": offsets_U1,
        "train_lengths_U": train_lengths_U,
        "validation_U": np.where(asked_U, items_N[validation_U], -1),
        "test_U": np.where(asked_U, items_N[test_U], -1),
        "validation_times_U": np.where(asked_U, times_N[validation_U], 0),
        "test_times_U": np.where(asked_U, times_N[test_U], 0),
        "num_items": np.array(store.num_items),
        "timed": np.array(store.timed),
    }


def write_split(store: SequenceStore, path: Path) -> Path:
    """Write the split file of a store, whole or not at all, and return its path."""
    arrays = split_arrays(store)
    with atomic_file(path) as temporary, temporary.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
    return path
