"""Small logs and stores for the tests of the data room."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from slipstream.data.ingest import Filters, ingest
from slipstream.data.raw_log import Columns, RawLog
from slipstream.data.store import SequenceStore

Behaviour = tuple[Any, Any, int]  # user, item, time
# A log of four behaviours.
GOOD = {
    "user_id": [1, 1, 2, 2],
    "item_id": [5, 6, 5, 7],
    "timestamp": [1, 2, 3, 4],
    "click": [0, 1, 1, 0],
}
# MovieLens in miniature (user, item, rating, time), and its sequences of (item, time).
RATINGS = [(1, 10, 5, 100), (1, 20, 3, 100), (2, 10, 4, 50), (1, 30, 1, 90), (2, 30, 2, 60)]
EXPECTED = {1: [(30, 90), (10, 100), (20, 100)], 2: [(10, 50), (30, 60)]}


def store_of(
    directory: Path,
    rows: Sequence[Behaviour],
    filters: Filters | None = None,
    duplicates: str = "keep",
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
    columns = Columns("user_id", "item_id", "timestamp", tuple(actions))
    frame = pl.scan_parquet(directory / "log.parquet")
    log = RawLog(frame, columns, untyped=False, duplicates=duplicates)
    out = directory / "store"
    out.mkdir()
    ingest(log, out, filters or Filters())
    return SequenceStore.open(out)


def store_with_lengths(
    directory: Path, lengths: Sequence[int], items: int = 50, seed: int = 0
) -> SequenceStore:
    """A store whose user u has `lengths[u]` behaviours at 10, 20, 30 …, with an action `click`."""
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
    from slipstream.cli.app import main

    monkeypatch.setattr(sys, "argv", ["slipstream", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def csv(rows: list[str]) -> str:
    """A CSV log of these lines, with the columns of `GOOD`."""
    return "user_id,item_id,timestamp,click\n" + "\n".join(rows) + "\n"


def refuse(arguments, tmp_path, monkeypatch, capsys) -> str:
    """Run, expect exit 1 with a single `error:` line, and nothing new on the disk."""
    before = sorted(os.listdir(tmp_path))
    assert run_cli(arguments, monkeypatch) == 1
    message = capsys.readouterr().err.strip()
    assert message.startswith("error: ") and "\n" not in message and "Traceback" not in message
    assert sorted(os.listdir(tmp_path)) == before
    return message


def movielens_1m(root: Path) -> Path:
    """A folder in the shape of the MovieLens 1M release, with `RATINGS`."""
    root.mkdir()
    (root / "ratings.dat").write_text("".join("::".join(map(str, row)) + "\n" for row in RATINGS))
    movies = (
        "10::Héat: A Film (1995)::Action|Crime\n20::Nothing::Drama\n40::Never Rated (1990)::Drama\n"
    )
    (root / "movies.dat").write_bytes(movies.encode("latin-1"))
    (root / "users.dat").write_text("1::F::18::3::12345\n2::M::25::7::54321\n")
    return root
