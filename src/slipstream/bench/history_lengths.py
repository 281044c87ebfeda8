"""Lengths of real users' histories, for measurements whose speed depends on them.

Touch this when a data set's lengths are found in another place or form.
"""

import os
from pathlib import Path

import numpy as np
import polars as pl

from slipstream.data.catalogue import ENTRIES
from slipstream.data.store import META, SequenceStore
from slipstream.errors import SlipstreamError


def real_lengths(name: str) -> np.ndarray | None:
    """Read the lengths of all users of a data set, or return None where it is not found.

    The folders of `$SLIPSTREAM_DATA` are tried in order for a prepared store, counted lengths or a
    raw log.
    """
    for folder in os.environ.get("SLIPSTREAM_DATA", "data").split(os.pathsep):
        root = Path(folder) / name
        counted = root / "standard_log_length_per_user.csv.gz"
        if (root / META).is_file():
            return SequenceStore.open(root).lengths_U
        if counted.is_file():
            return pl.read_csv(counted)["n_standard"].to_numpy()
        try:
            if root.is_dir():
                log = ENTRIES[name].read(root).frame
                return (
                    log.group_by("user")
                    .len()
                    .sort("user")
                    .collect(engine="streaming")["len"]
                    .to_numpy()
                    .astype(np.int64)
                )
        except SlipstreamError:
            continue
    return None
