"""`ss.prepare`: a data set, files, a frame or a query becomes a store.

Touch this when there is a new choice; the work is in data/preparation.py.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.api.arguments import clear_arguments, in_python_words, path_of
from slipstream.data.catalogue import NAMES
from slipstream.data.choices import Choices, FeatureFile, TableSource
from slipstream.data.item_vectors import VectorSource
from slipstream.data.preparation import prepare as prepare_store
from slipstream.data.raw_log import Columns, Progress
from slipstream.data.store import SequenceStore
from slipstream.data.synthetic import Synthetic
from slipstream.errors import SlipstreamError
from slipstream.progress import Ticker

PathLike = str | os.PathLike[str]
Names = str | Sequence[str] | Mapping[str, str]
_ONE_BY_ONE = "name the columns one by one: user=…, item=…, time=…, actions=[…]"
_HINTS = {
    "columns": _ONE_BY_ONE,
    "column_names": _ONE_BY_ONE,
    "user_column": "did you mean 'user'?",
    "user_col": "did you mean 'user'?",
    "item_column": "did you mean 'item'?",
    "item_col": "did you mean 'item'?",
    "time_column": "did you mean 'time'?",
    "timestamp": "did you mean 'time'?",
    "action_columns": "did you mean 'actions'?",
    "context_columns": "did you mean 'context'?",
    "title_column": "did you mean 'title'?",
    "name": "the data comes first and has no name; did you mean 'out'?",
}


@clear_arguments(_HINTS)
def prepare(
    data: TableSource | None = None,
    out: PathLike | None = None,
    *,
    user: str = "user_id",
    item: str = "item_id",
    time: str | None = "timestamp",
    actions: Names = (),
    action_values: Mapping[str, float] | None = None,
    context: Names = (),
    title: str | None = None,
    time_unit: str | None = None,
    nulls: str | None = None,
    duplicates: str | None = None,
    items: TableSource | None = None,
    item_id: str | None = None,
    item_features: Names = (),
    item_title: str | None = None,
    users: TableSource | None = None,
    user_id: str | None = None,
    user_features: Names = (),
    separator: str | None = None,
    item_vectors: Mapping[str, VectorSource] | None = None,
    sql: str | None = None,
    database: PathLike | None = None,
    source: PathLike | None = None,
    min_item_count: int | None = None,
    min_user_count: int | None = None,
    k_core: int | None = None,
    category: str = "All_Beauty",
    synthetic: Synthetic | None = None,
    force: bool = False,
    quiet: bool = False,
    progress: Progress | None = None,
) -> SequenceStore:
    """Prepare a log as a sequence store in `out` (default data/<name>), and open it.

    `data` is the name of a known data set, a file, several files, or a frame (Polars, pandas,
    Arrow); `sql` asks DuckDB instead. `user`, `item`, `time` and `actions` are the log's columns;
    `time=None` means that the order of rows is the order. `context` are columns of categories that
    a behaviour happened with, such as device and surface. `items` is a file or a frame with
    `item_features` and titles, `users` the same for users; without them the features are columns
    of the log. `item_vectors` are pretrained vectors by name: a Parquet file, a frame with ids and
    a column of lists, x.npy with x.ids.npy, or (ids, matrix). `force` replaces a store in `out`.
    """
    with in_python_words():
        choices = Choices(
            source=None if source is None else path_of("source", source),
            columns=Columns(
                _word("user", user),
                _word("item", item),
                None if time is None else _word("time", time),
                _words("actions", actions),
                None if title is None else _word("title", title),
                time_optional=time == "timestamp",
                context=_words("context", context),
            ),
            time_unit=time_unit,
            nulls=nulls,
            duplicates=duplicates,
            action_values=action_values,
            items=_features(
                items, item_id, _words("item_features", item_features), item_title, separator
            ),
            users=_features(
                users, user_id, _words("user_features", user_features), None, separator
            ),
            item_vectors=item_vectors or {},
            sql=sql,
            database=None if database is None else path_of("database", database),
            min_item_count=min_item_count,
            min_user_count=min_user_count,
            k_core=k_core,
            category=category,
            synthetic=synthetic or Synthetic(),
        )
        target = Path("data") / default_name(data) if out is None else path_of("out", out)
        with Ticker(patience=1e9 if quiet else 2.0) as ticker:
            return prepare_store(data, target, choices, force=force, progress=progress or ticker)


def default_name(data: Any) -> str:
    """Return the name of a store whose place is not given: that of the data set or of the file."""
    if data is None:
        return "query"
    if isinstance(data, Sequence) and not isinstance(data, str) and data:
        data = data[0]
    if not isinstance(data, str | os.PathLike):
        return "frame"
    if str(data) in NAMES:
        return str(data)
    path = Path(data)
    while re.search(r"[*?\[\]]", path.name):  # a pattern: its folder has a name
        path = path.parent
    return path.name.split(".")[0] or path.resolve().name or "log"


def _features(
    data: Any, id: str | None, names: tuple[str, ...], title: str | None, separator: str | None
) -> FeatureFile | None:
    if data is None and not names and title is None:
        return None
    return FeatureFile(data, id, names, title, separator)


def _word(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise SlipstreamError(f"{name} must be the name of a column, got {value!r}")
    return value


def _words(name: str, values: Any) -> tuple[str, ...]:
    """Return names of columns, given as one, several, or with their kinds."""
    if isinstance(values, str):
        return (values,)
    if isinstance(values, Mapping):
        return tuple(f"{_word(name, each)}:{_word(name, kind)}" for each, kind in values.items())
    if not isinstance(values, Sequence):
        raise SlipstreamError(f"{name} must be a list of columns, got {values!r}")
    return tuple(_word(f"each of {name}", each) for each in values)
