"""Small logs and stores for the tests of the data room."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from slipstream.cli.app import main
from slipstream.data.ingest import Filters, ingest
from slipstream.data.preparation import own_log
from slipstream.data.raw_log import Columns
from slipstream.data.store import SequenceStore

Behaviour = tuple[Any, Any, int]  # user, item, time


def store_of(
    directory: Path,
    rows: Sequence[Behaviour],
    filters: Filters | None = None,
    **actions: Sequence[float],
) -> SequenceStore:
    """A store of a log given as rows, through a Parquet file as any user would."""
    directory.mkdir(parents=True, exist_ok=True)
    users, items, times = zip(*rows, strict=True)
    frame = pl.DataFrame(
        {"user_id": list(users), "item_id": list(items), "timestamp": list(times)}
        | {k: list(v) for k, v in actions.items()}
    )
    frame.write_parquet(directory / "log.parquet")
    log = own_log(
        [directory / "log.parquet"], Columns("user_id", "item_id", "timestamp", tuple(actions)), "s"
    )
    out = directory / "store"
    out.mkdir()
    ingest(log, out, filters or Filters())
    return SequenceStore.open(out)


def store_with_lengths(
    directory: Path, lengths: Sequence[int], items: int = 50, seed: int = 0
) -> SequenceStore:
    """A store whose user u has `lengths[u]` behaviours with times 10, 20, 30 … and an action
    `click`.
    """
    generator = np.random.default_rng(seed)
    rows = [
        (user, int(generator.integers(items)), 10 * (place + 1))
        for user, length in enumerate(lengths)
        for place in range(length)
    ]
    return store_of(directory, rows, click=[float(generator.integers(2)) for _ in rows])


def sequences(store: SequenceStore) -> dict[Any, list[tuple[Any, int]]]:
    """Every user's (item, time) list, by original ids."""
    found = {}
    for user in range(store.num_users):
        part = slice(store.offsets_U1[user], store.offsets_U1[user + 1])
        items = [store.items.id(int(row)) for row in store.items_N[part]]
        found[store.users.id(user)] = list(
            zip(items, store.timestamps_N[part].tolist(), strict=True)
        )
    return found


def run_cli(arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """`slipstream …` in this process; returns the exit code."""
    monkeypatch.setattr(sys, "argv", ["slipstream", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)
