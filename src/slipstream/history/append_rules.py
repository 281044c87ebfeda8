"""What may be appended to a history store. Touch this when a rule of appending changes."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from slipstream.history.history_store import AppendError
from slipstream.history.user_history import History

MAX_TEXT = 256  # characters of an item, a label or the name of a column
MAX_USER = 320  # characters of a user: 256 of its own, and the name of a tenant
MAX_ACTIONS = 64  # different actions and context columns of a user
DAY = 86_400
UNITS = {10**3: "milliseconds", 10**6: "microseconds", 10**9: "nanoseconds"}


def check_user(user: str) -> None:
    """Refuse a user that no store can keep."""
    _check_text("a user", user, MAX_USER)


def is_user(user: str) -> bool:
    """Tell whether a store could know a user of this name."""
    try:
        check_user(user)
    except AppendError:
        return False
    return True


def check_histories(histories: Sequence[tuple[str, History]]) -> list[tuple[str, History]]:
    """Return the histories of an import as `check_history` does; a refusal names the user."""
    checked = []
    for user, history in histories:
        check_user(user)
        try:
            checked.append((user, check_history(history)))
        except AppendError as error:
            raise AppendError(f"user '{user}': {error}") from error
    return checked


def check_history(history: History, now: float | None = None) -> History:
    """Return a history as columns of the stored types; `AppendError` where it cannot be stored."""
    items_T = _item_column(history.items)
    try:
        times_T = np.asarray(history.timestamps)
        if times_T.size and times_T.dtype.kind not in "iu":
            raise TypeError
        times_T = times_T.astype("<i8")
        actions = {
            name: np.asarray(values, dtype="<f4") for name, values in history.actions.items()
        }
    except (TypeError, ValueError, OverflowError) as error:
        raise AppendError(
            "times must be whole seconds since 1970, and the values of an action numbers"
        ) from error
    context = {name: _label_column(labels) for name, labels in history.context.items()}
    for name, column in [("timestamps", times_T), *actions.items(), *context.items()]:
        if column.shape != items_T.shape:
            raise AppendError(
                f"'{name}' has {column.size} values for {items_T.size} behaviours; send one for "
                "each"
            )
    for name in actions:
        _check_text("the name of an action", name)
    for name in context:
        _check_text("the name of a context column", name)
    if len(actions) + len(context) > MAX_ACTIONS:
        raise AppendError(
            f"behaviours have at most {MAX_ACTIONS} actions and context columns, not "
            f"{len(actions) + len(context)}"
        )
    if times_T.size:
        if (times_T[1:] < times_T[:-1]).any():
            raise AppendError("the times of the behaviours go back; send them oldest first")
        refuse_future(int(times_T[-1]), time.time() if now is None else now)
    return History(items_T, times_T, actions, first=history.first, context=context)


def id_kind(items_T: np.ndarray) -> str:
    """Return the kind of a history's ids: "numbers" or "text"."""
    return "text" if items_T.dtype.kind == "O" else "numbers"


def refuse_future(newest: int, now: float) -> None:
    """Refuse a time more than a day after now; most such times are in another unit."""
    if newest <= now + DAY:
        return
    for unit, name in UNITS.items():
        if 10**8 <= newest // unit <= now + DAY:
            raise AppendError(f"{newest} looks like {name}; send seconds since 1970")
    raise AppendError(
        f"the time {newest} lies more than a day after now ({int(now)}); send seconds since 1970"
    )


def refuse_going_back(user_last: int, history: History) -> None:
    """Refuse behaviours older than the last stored one: they would change every prefix since."""
    if len(history) and int(history.timestamps[0]) < user_last:
        sent = int(history.timestamps[0])
        raise AppendError(
            f"the first behaviour is from {sent}, but one from {user_last} is stored already; "
            "send them in order"
        )


def refuse_wrong_count(total: int, after: int | None) -> None:
    """Refuse an append whose sender believes that another number is stored."""
    if after is not None and after != total:
        raise AppendError(
            f"{total} behaviours are stored, not {after}; this request may have been carried out "
            "before"
        )


def refuse_other_kind(stored: str, history: History) -> None:
    """Refuse text ids for a user whose stored ids are whole numbers, and the reverse."""
    if len(history) and id_kind(history.items) != stored:
        sent = {"numbers": "whole numbers", "text": "text"}
        raise AppendError(
            f"the items of this user are {sent[stored]}, but {sent[id_kind(history.items)]} was "
            f"sent; send {sent[stored]}, or delete the user first"
        )


def refuse_many_actions(count: int) -> None:
    """Refuse a user's behaviours with too many different actions."""
    if count > MAX_ACTIONS:
        raise AppendError(
            f"a user's behaviours have at most {MAX_ACTIONS} different actions and context "
            "columns; use fewer names"
        )


def _item_column(items: Any) -> np.ndarray:
    """Return ids as int64, or as an object array of text."""
    if not len(items):
        return np.zeros(0, dtype="<i8")
    if isinstance(items, np.ndarray) and items.dtype.kind in "iu":
        column = items
    else:
        listed = items.tolist() if isinstance(items, np.ndarray) else list(items)
        if all(isinstance(item, str) for item in listed):
            for item in listed:
                _check_text("an item", item)
            column = np.empty(len(listed), dtype=object)
            column[:] = listed
            return column
        if not all(isinstance(item, int | np.integer) for item in listed) or any(
            isinstance(item, bool) for item in listed
        ):
            raise AppendError("items must be whole numbers, or all of them text")
        try:
            column = np.array(listed, dtype=np.int64)
        except OverflowError as error:
            raise AppendError("an item is outside the whole numbers of 64 bits") from error
    if column.dtype.kind == "u" and int(column.max()) >= 2**63:
        raise AppendError("an item is outside the whole numbers of 64 bits")
    return column.astype("<i8")


def _label_column(labels: Any) -> np.ndarray:
    """Return labels of context as an object array of text, empty where one is not known."""
    listed = ["" if label is None else label for label in labels]
    for label in dict.fromkeys(listed):
        if label != "":
            _check_text("a label of context", label)
    column = np.empty(len(listed), dtype=object)
    column[:] = listed
    return column


def _check_text(noun: str, text: str, longest: int = MAX_TEXT) -> None:
    if not isinstance(text, str) or not 1 <= len(text) <= longest:
        raise AppendError(f"{noun} must be a text of 1 to {longest} characters")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise AppendError(f"{noun} must be valid Unicode text, not {text!a}") from error
