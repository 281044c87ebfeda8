"""From a request's message to a `History` and back, and what is refused on the way.

Touch this when a message says something else about behaviours, or a time is checked in another way.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from slipstream.history.append_rules import refuse_future
from slipstream.history.history_store import AppendError
from slipstream.history.user_history import History
from slipstream.serving.http import messages as m
from slipstream.serving.id_arrays import id_array
from slipstream.serving.request_errors import BadRequest

if TYPE_CHECKING:  # a stand-in can be served without torch
    from slipstream.serving.instance.instance import Instance


def read_history(
    message: m.HistoryMessage, features: m.Features | None = None, timed: bool = True
) -> History:
    """Return a message's history; `BadRequest` where lengths differ or time goes back.

    A model that is not `timed` needs no timestamps.
    """
    items = id_array(message.items)
    if message.timestamps is None and timed and len(items):
        raise BadRequest("a history has no timestamps; send one per item, in seconds since 1970")
    times = message.timestamps if message.timestamps is not None else [0] * len(items)
    timestamps = np.array(times, dtype=np.int64)
    if len(timestamps) != len(items):
        raise BadRequest(
            f"a history has {len(items)} items but {len(timestamps)} timestamps; send one for each"
        )
    if (timestamps[1:] < timestamps[:-1]).any():
        raise BadRequest("the timestamps of a history go back; send behaviours oldest first")
    actions = {name: np.array(values, dtype=np.float32) for name, values in message.actions.items()}
    for name, values in actions.items():
        if len(values) != len(items):
            raise BadRequest(
                f"action '{name}' has {len(values)} values for {len(items)} behaviours; send one "
                "for each"
            )
    context = {name: label_array(labels) for name, labels in message.context.items()}
    for name, labels in context.items():
        if len(labels) != len(items):
            raise BadRequest(
                f"context '{name}' has {len(labels)} labels for {len(items)} behaviours; send one "
                "for each"
            )
    return History(items, timestamps, actions, features or {}, context=context)


def write_history(stored: History) -> m.HistoryMessage:
    """Return the message that says what a stored history holds."""
    return m.HistoryMessage(
        stored.items.tolist(),
        stored.timestamps.tolist(),
        {name: values.tolist() for name, values in stored.actions.items()},
        {name: [label or None for label in each] for name, each in stored.context.items()},
    )


def label_array(labels: Sequence[str | None]) -> np.ndarray:
    """Return labels as a history holds them: text, empty where it is not known."""
    return np.array([label or "" for label in labels], dtype=object)


def check_times(timestamps: Sequence[int], now: int) -> None:
    """Refuse times of more than a day ahead: stored, they would block every later behaviour."""
    try:
        refuse_future(max(timestamps), now)
    except AppendError as error:
        raise BadRequest(str(error)) from error


def refuse_long(history: History, max_len: int, allow_truncate: bool) -> None:
    """Refuse a sent history longer than is read, unless its latest part is enough."""
    if len(history) > max_len and not allow_truncate:
        raise BadRequest(
            f"a history of {len(history)} behaviours is longer than the {max_len} this model "
            "reads; send the most recent, or allow_truncate"
        )


def select_actions(stored: History, names: Sequence[str]) -> History:
    """Return a stored history with these actions only; one that was never stored counts as 0."""
    if stored.actions.keys() == set(names):
        return stored
    absent = np.zeros(len(stored), dtype=np.float32)
    return replace(stored, actions={name: stored.actions.get(name, absent) for name in names})


def append_recent(stored: History, recent: History) -> History:
    """Return the behaviours after the prefix: newly stored ones, then those of the request."""
    if len(stored) and len(recent) and recent.timestamps[0] < stored.timestamps[-1]:
        raise BadRequest(
            "the recent behaviours are older than stored ones; send only what is not stored yet"
        )
    return stored.then(recent)


def drop_unknown(instance: "Instance", history: History) -> History:
    """Return the behaviours whose items the catalogue holds."""
    if not len(history) or instance.items.has_seen(history):
        return history
    return history.where(instance.items.contains(history.items))
