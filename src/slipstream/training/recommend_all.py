"""Recommendations for every user of a store, as one Parquet file: user, items, scores.

Users are answered in parts, each one pass over the catalogue. A part is a file of its own beside
the result, whole or absent, so a stopped command goes on with the next part. The parts know which
question they answer: other weights, data or choices begin anew. Touch this when all users are
answered in another way.
"""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from slipstream.data.store import SequenceStore
from slipstream.errors import SlipstreamError
from slipstream.files import atomic_file, read_json, write_json
from slipstream.training.recommendation import recommend
from slipstream.training.recommender import Recommender

PART_USERS = 16_384
QUESTION = "question.json"
Tell = Callable[[str, int, int], None]


def recommend_all(
    recommender: Recommender,
    store: SequenceStore,
    out: Path,
    count: int = 10,
    *,
    repeat: str | None = None,
    force: bool = False,
    tell: Tell = lambda what, done, total: None,
) -> int:
    """Write the `count` best items of every user to the Parquet file `out`; return the users.

    Parts that an earlier call with the same question has left are kept. `tell` hears of progress.
    """
    check_out(out, force=force)
    users_U = np.flatnonzero(store.lengths_U > 0)
    parts = out.parent / f".{out.name}.parts"
    _open_parts(parts, _question(recommender, store, count, repeat))
    paths = []
    for number, begin in enumerate(range(0, users_U.size, PART_USERS)):
        paths.append(parts / f"part-{number:06d}.parquet")
        tell("recommending", begin, int(users_U.size))
        if not paths[-1].exists():
            mine = users_U[begin : begin + PART_USERS]
            table = _answer(recommender, store, mine, count, repeat)
            with atomic_file(paths[-1]) as path:
                pq.write_table(table, path)
    tell("joining the parts", 0, 0)
    with atomic_file(out) as path, pq.ParquetWriter(path, _schema(store)) as writer:
        for each in paths:
            writer.write_table(pq.read_table(each))
    shutil.rmtree(parts, ignore_errors=True)
    return int(users_U.size)


def check_out(out: Path, *, force: bool) -> None:
    """Refuse a place for the result that holds something else."""
    if out.is_dir():
        raise SlipstreamError(f"{out} is a directory; give a file, for example {out}/top.parquet")
    if out.exists() and not force:
        raise SlipstreamError(
            f"{out} exists already; give another --out, or --force to replace this file"
        )


def _question(
    recommender: Recommender, store: SequenceStore, count: int, repeat: str | None
) -> dict[str, Any]:
    """Return what decides the answers."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in recommender.model.state_dict().items():
        digest.update(name.encode())
        digest.update(value.cpu().contiguous().numpy().tobytes())
    return {
        "weights": digest.hexdigest(),
        "store": store.digest,
        "count": count,
        "repeat": repeat or recommender.recipe.repeat,
        "part_users": PART_USERS,
    }


def _open_parts(parts: Path, question: dict[str, Any]) -> None:
    """Keep the parts that answer the same question, and no others."""
    if not (parts / QUESTION).exists() or read_json(parts / QUESTION) != question:
        shutil.rmtree(parts, ignore_errors=True)
        write_json(parts / QUESTION, question)


def _schema(store: SequenceStore) -> pa.Schema:
    items = pa.list_(store.items.ids.type)
    return pa.schema(
        [("user", store.users.ids.type), ("items", items), ("scores", pa.list_(pa.float32()))]
    )


def _answer(
    recommender: Recommender,
    store: SequenceStore,
    users: np.ndarray,
    count: int,
    repeat: str | None,
) -> pa.Table:
    """Return the recommendations of some users in original ids."""
    found = recommend(recommender, store, users, count, repeat=repeat)
    ends = np.cumsum([0, *(len(each.items) for each in found)]).astype(np.int32)
    rows = np.array([row for each in found for row in each.items], dtype=np.int64)
    scores = np.array([score for each in found for score in each.scores], dtype=np.float32)
    columns = [
        store.users.ids.take(pa.array([each.user for each in found], pa.int64())),
        pa.ListArray.from_arrays(ends, store.items.ids.take(pa.array(rows))),
        pa.ListArray.from_arrays(ends, pa.array(scores)),
    ]
    return pa.table(columns, schema=_schema(store))
