"""What `slipstream client` reads from the command line: ids, times, actions, context, histories.

Touch this when a value may be written in another way.
"""

import json
import time
from typing import TYPE_CHECKING, Any

from slipstream.errors import SlipstreamError

if TYPE_CHECKING:
    from slipstream.serving.http import messages


def read_list(text: str) -> list[int | str]:
    """Read ids from the command line; what is no JSON stays text, and the server knows its kind."""
    parts: list[Any] = [part.strip() for part in text.split(",")]
    if text.lstrip().startswith("["):
        try:
            parts = json.loads(text)
        except ValueError:
            parts = [None]
    if not parts or not all(type(part) in (int, str) and part != "" for part in parts):
        raise SlipstreamError(
            f'\'{text}\' is not a list of ids; write them like 1,2,3 or ["a,b", "c"]'
        )
    return parts


def read_times(text: str, count: int) -> list[int]:
    """Read times from the command line; now for each of `count` items where none are given."""
    try:
        return [int(part) for part in text.split(",")] if text else [int(time.time())] * count
    except ValueError as error:
        raise SlipstreamError(
            f"'{text}' is not a list of times; write seconds like 978300000,978300100"
        ) from error


def read_actions(given: list[str] | None) -> dict[str, list[float]]:
    """Read actions from the command line: NAME=V1,V2,…"""
    values: dict[str, list[float]] = {}
    for action in given or []:
        name, _, text = action.partition("=")
        try:
            values[name] = [float(part) for part in text.split(",")]
        except ValueError as error:
            raise SlipstreamError(
                f"'{action}' is not an action; write it like click=1,0,1"
            ) from error
    return values


def read_labels(given: list[str] | None) -> dict[str, list[str | None]]:
    """Read labels of context from the command line; an empty one is not known."""
    values: dict[str, list[str | None]] = {}
    for each in given or []:
        name, equals, text = each.partition("=")
        if not equals or not name:
            raise SlipstreamError(f"'{each}' is no context; write it like surface=home")
        values[name] = [part.strip() or None for part in text.split(",")]
    return values


def read_request_labels(given: list[str] | None) -> dict[str, str | None]:
    """Read the context of a request: one label a name."""
    found = read_labels(given)
    for name, labels in found.items():
        if len(labels) != 1:
            raise SlipstreamError(
                f"a request has one label of context '{name}', not {len(labels)}; write it like "
                f"{name}={labels[0]}"
            )
    return {name: labels[0] for name, labels in found.items()}


def read_message(
    history: str, timestamps: str, actions: list[str] | None
) -> "messages.HistoryMessage | None":
    """Return the history that a command was given, None where it names a stored user only."""
    from slipstream.serving.http.messages import HistoryMessage

    if not history:
        return None
    items = read_list(history)
    return HistoryMessage(items, read_times(timestamps, len(items)), read_actions(actions))


def read_names(text: str) -> list[str]:
    """Read names separated by commas."""
    return [part.strip() for part in text.split(",") if part.strip()]
