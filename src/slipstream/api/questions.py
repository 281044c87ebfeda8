"""Who an answer is for: users of a store by their ids, or histories given by hand.

Touch this when a history can be given in another form. Ids are always the original ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from slipstream.api.arguments import ids_of, is_id
from slipstream.data.log_ids import TEXT_TYPES
from slipstream.data.store import Feature, SequenceStore, Vocabulary
from slipstream.errors import SlipstreamError, did_you_mean
from slipstream.history.user_history import History

FIELDS = ("items", "timestamps", "actions", "user_features", "context")


@dataclass(frozen=True)
class Question:
    """A user (an original id, or the place or name of a history given by hand) and what they did.

    The history is whole; the window of the model is cut out of it later.
    """

    user: int | str
    history: History


def questions(
    users: Any,
    histories: Any,
    store: SequenceStore | None,
    items: Vocabulary,
    features: Sequence[str] = (),
) -> list[Question]:
    """Return whom to answer: `users` of the store, all of them if neither is given, or histories.

    `items` is the catalogue of the model that answers, `features` are the user features it reads.
    """
    if users is not None and histories is not None:
        raise SlipstreamError("give users or histories, not both")
    if histories is not None:
        return [
            Question(user, _checked(history, user, items))
            for user, history in _by_user(histories).items()
        ]
    if store is None:
        raise SlipstreamError(
            "a bundle holds no users; give histories=…, or open it with the store that has their "
            "histories: ss.load(BUNDLE, data=STORE)"
        )
    rows = list(range(store.num_users))
    if users is not None:
        rows = [store.users.row(user) for user in ids_of("users", users)]
    return [
        Question(store.users.id(row), stored_history(store, row, items, features)) for row in rows
    ]


def stored_history(
    store: SequenceStore, user: int, items: Vocabulary, features: Sequence[str] = ()
) -> History:
    """Return all that a user of a store (a row) did, without what the catalogue `items` lacks."""
    cut = slice(int(store.offsets_U1[user]), int(store.offsets_U1[user + 1]))
    rows_T = store.items_N[cut]
    ids_T = _original_ids(store.items, rows_T)
    history = History(
        ids_T,
        store.timestamps_N[cut].copy(),
        {name: values_N[cut] for name, values_N in store.actions.items()},
        {
            name: _feature_value(store.user_features[name], user)
            for name in features
            if name in store.user_features
        },
        context={name: _labels(column, cut) for name, column in store.context.items()},
    )
    if items is store.items:
        return history
    known_T = np.array([items.find(item) is not None for item in ids_T.tolist()], dtype=bool)
    return history.where(known_T)


def _feature_value(feature: Feature, row: int) -> Any:
    """Return a feature of one row as it was before it was stored; None is not known."""
    if feature.values is not None:
        value = float(feature.values[row])
        return None if np.isnan(value) else value
    if feature.offsets_V1 is None:
        code = int(feature.codes[row])
        return feature.labels[code].as_py() if code else None
    begin, end = feature.offsets_V1[row : row + 2].tolist()
    return [feature.labels[int(code)].as_py() for code in feature.codes[begin:end] if code]


def _labels(column: Feature, cut: slice) -> np.ndarray:
    """Return the labels of a context column, empty where one is not known."""
    return np.array(column.labels.to_pylist(), dtype=object)[column.codes[cut]]


def _original_ids(vocabulary: Vocabulary, rows_T: np.ndarray) -> np.ndarray:
    if vocabulary.ids_V is not None:
        return np.asarray(vocabulary.ids_V[rows_T])
    return np.array([vocabulary.id(int(row)) for row in rows_T], dtype=object)


def _by_user(histories: Any) -> dict[int | str, History]:
    """Return histories by user: their own name where there is one, else their place from 0."""
    frame = as_frame(histories)
    if frame is not None:
        return _from_frame(frame)
    if _is_one_history(histories):
        return {0: _one_history(histories)}
    if isinstance(histories, Mapping):
        named = {user: _one_history(given) for user, given in histories.items() if is_id(user)}
        if len(named) == len(histories) and named:
            return named
    elif hasattr(histories, "__iter__") and not isinstance(histories, str):
        found: dict[int | str, History] = {
            place: _one_history(given) for place, given in enumerate(histories)
        }
        if found:
            return found
    raise SlipstreamError(
        "histories must hold at least one history: an ss.History, a list of item ids, a dict with "
        f"'items' and 'timestamps', a frame, or several of these; got {_short(histories)}"
    )


def _is_one_history(given: Any) -> bool:
    if isinstance(given, History):
        return True
    if isinstance(given, Mapping):
        return any(name in given for name in (*FIELDS, "item", "timestamp", "time"))
    if isinstance(given, np.ndarray):
        given = given.tolist()
    is_list = isinstance(given, Sequence) and not isinstance(given, str) and bool(given)
    return is_list and all(is_id(each) for each in given)


def _one_history(given: Any) -> History:
    frame = as_frame(given)
    if frame is not None:
        found = _from_frame(frame)
        if len(found) != 1:
            raise SlipstreamError("a frame in a list of histories must hold one user's behaviours")
        return next(iter(found.values()))
    if isinstance(given, History):
        return given
    if isinstance(given, Mapping):
        for name in given:
            if name not in FIELDS:
                raise SlipstreamError(
                    f"a history has no field '{name}'{did_you_mean(str(name), FIELDS)}"
                )
        items = ids_of("items of a history", given.get("items", []))
        times = given.get("timestamps")
        return History(
            items,
            np.zeros(len(items), dtype=np.int64) if times is None else times,
            given.get("actions") or {},
            given.get("user_features") or {},
            context=given.get("context") or {},
        )
    items = ids_of("a history", given)
    return History(items, np.zeros(len(items), dtype=np.int64))


def _from_frame(frame: pl.DataFrame) -> dict[int | str, History]:
    """Return the histories of a frame with a column `item`, perhaps `timestamp` and `user`.

    Rows keep their order; every other column is an action, or context if it holds text.
    """
    if "item" not in frame.columns:
        raise SlipstreamError(
            "a frame of histories needs the columns item and timestamp (and user for several "
            f"users), but it has {', '.join(frame.columns) or 'none'}"
        )
    if "timestamp" in frame.columns and isinstance(frame.schema["timestamp"], pl.Datetime):
        frame = frame.with_columns(pl.col("timestamp").dt.epoch("s"))
    if not len(frame):
        raise SlipstreamError("the frame of histories is empty; give at least one behaviour")
    parts = {0: frame}
    if "user" in frame.columns:
        parts = {
            user: part
            for (user,), part in frame.partition_by(
                "user", as_dict=True, maintain_order=True
            ).items()
        }
    return {user: _history_of(part) for user, part in parts.items()}


def _history_of(frame: pl.DataFrame) -> History:
    untimed = np.zeros(len(frame), dtype=np.int64)
    others = [name for name in frame.columns if name not in ("item", "timestamp", "user")]
    texts = [name for name in others if frame.schema[name] in TEXT_TYPES]
    return History(
        frame["item"].to_list(),
        frame["timestamp"].to_numpy() if "timestamp" in frame.columns else untimed,
        {name: frame[name].to_numpy() for name in others if name not in texts},
        context={
            name: frame[name].cast(pl.String).fill_null("").to_numpy().astype(object)
            for name in texts
        },
    )


def _checked(history: History, user: int | str, items: Vocabulary) -> History:
    """Return a history given by hand with its ids as the catalogue has them."""
    given = ids_of(f"items of history {user!r}", history.items)
    if not given:
        raise SlipstreamError(f"history {user!r} is empty; give at least one item")
    rows_T = items.rows(given)
    if items.ids_V is not None:
        return replace(history, items=items.ids_V[rows_T])
    ids = [items.id(row) for row in rows_T.tolist()]
    return replace(history, items=np.array(ids, dtype=object))


def as_frame(value: Any) -> pl.DataFrame | None:
    """Return a Polars, pandas or Arrow table as a Polars frame; None for anything else."""
    if isinstance(value, pl.DataFrame):
        return value
    if isinstance(value, pl.LazyFrame):
        return value.collect()
    if isinstance(value, pa.Table | pa.RecordBatch):
        return pl.DataFrame(pl.from_arrow(value))
    if type(value).__module__.split(".")[0] == "pandas" and hasattr(value, "columns"):
        return pl.from_pandas(value)
    return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
