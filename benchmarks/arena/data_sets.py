"""The data sets of the arena, and how each becomes a store.

Touch this to add a data set. Files that `$SLIPSTREAM_DATA` names are read where they are.
"""

import gzip
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from slipstream import api
from slipstream.data.store import SequenceStore
from slipstream.data.synthetic import Synthetic
from slipstream.errors import SlipstreamError

QUICK = "synthetic"
USER, ITEM = "user_id", "item_id"


@dataclass(frozen=True)
class DataSet:
    """A data set: its name, what it is, and the function that prepares it into a directory."""

    name: str
    about: str
    prepare: Callable[[Path], SequenceStore]
    short_histories: bool = False  # SASRec's authors then cut at 50 and drop out a half

    @property
    def claim_name(self) -> str:
        """The name as claims have it, without hyphens."""
        return self.name.replace("-", "")


def data_root() -> Path:
    """Return the folder of the data that cannot be downloaded."""
    return Path(os.environ.get("SLIPSTREAM_DATA", "data"))


def open_store(data: DataSet, directory: Path) -> SequenceStore:
    """Open the store of a data set, prepared on first use."""
    if not (directory / "store.json").exists():
        data.prepare(directory)
    return SequenceStore.open(directory)


def _given(name: str, *files: str) -> Path:
    """Return the first of the files in a folder of `$SLIPSTREAM_DATA`."""
    folder = data_root() / name
    for each in files:
        if (folder / each).is_file():
            return folder / each
    raise SlipstreamError(
        f"{folder} holds no {' or '.join(files)}; set SLIPSTREAM_DATA to the folder that has "
        f"'{name}', or leave it out of --data"
    )


def _lines(path: Path) -> list[list[str]]:
    """Return the words of every line of a text, which may be compressed."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        return [words for line in file if (words := line.split())]


def _prepare_pairs(directory: Path) -> SequenceStore:
    """Prepare Games: a user and an item a line, in the order of time."""
    lines = _lines(_given("games", "sequences.txt.gz", "sequences.txt"))
    users, items = ([int(words[place]) for words in lines] for place in (0, 1))
    return _prepare_frame(users, items, directory)


def _prepare_logs(directory: Path) -> SequenceStore:
    """Prepare LastFM: a user and all their items a line, in the order of time."""
    lines = _lines(_given("lastfm", "sequences.txt.gz", "sequences.txt"))
    users = [int(words[0]) for words in lines for _ in words[1:]]
    items = [int(word) for words in lines for word in words[1:]]
    return _prepare_frame(users, items, directory)


def _prepare_frame(users: list[int], items: list[int], directory: Path) -> SequenceStore:
    frame = pl.DataFrame({USER: users, ITEM: items})
    return api.prepare(frame, directory, user=USER, item=ITEM, time=None)


def _prepare_latest_small(directory: Path) -> SequenceStore:
    source = _given("ml-latest-small", "ratings.csv", "ratings.csv.gz").parent
    return api.prepare("ml-latest-small", directory, source=source)


def _prepare_ml_1m(directory: Path) -> SequenceStore:
    """Prepare MovieLens-1M with every rated movie."""
    return api.prepare("ml-1m", directory, min_item_count=1)


_SMALL = Synthetic(users=300, items=400, topics=20, length_mu=3.0, length_max=100, seed=1)


def _prepare_synthetic(directory: Path) -> SequenceStore:
    return api.prepare("synthetic", directory, synthetic=_SMALL, quiet=True)


DATA_SETS = {
    each.name: each
    for each in (
        DataSet("ml-1m", "MovieLens-1M, 3,706 items", _prepare_ml_1m),
        DataSet("ml-1m-3416", "MovieLens-1M, 3,416 items", lambda out: api.prepare("ml-1m", out)),
        DataSet("ml-100k", "MovieLens-100K", lambda out: api.prepare("ml-100k", out)),
        DataSet("ml-latest-small", "MovieLens latest-small", _prepare_latest_small),
        DataSet("games", "Amazon Games, no times", _prepare_pairs, short_histories=True),
        DataSet("lastfm", "LastFM, no times", _prepare_logs, short_histories=True),
        DataSet(QUICK, "300 users, made up", _prepare_synthetic),
    )
}
