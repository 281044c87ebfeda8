"""Histories and stores to keep them in, for the tests of the history stores."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import numpy as np

from slipstream.history.history_store import HistoryStore, open_history_store
from slipstream.history.user_history import History

Answer = TypeVar("Answer")
LATER = 2.0**64  # a clock behind which every int64 time lies


def behaviours(
    items: list[int] | list[str],
    timestamps: list[int] | None = None,
    first: int = 0,
    **actions: list[float],
) -> History:
    """A history; the times are 0, 1, 2 … or the items where none are given."""
    text = any(isinstance(item, str) for item in items)
    if timestamps is None:
        timestamps = list(range(len(items))) if text else items
    return History(
        np.array(items, dtype=object if text else np.int64),
        np.array(timestamps, dtype=np.int64),
        {name: np.array(values, dtype=np.float32) for name, values in actions.items()},
        first=first,
    )


def columns(history: History | None) -> tuple[list[object], list[int], dict[str, list[float]]]:
    """What a history holds, as lists; actions that are 0 everywhere are left out."""
    assert history is not None
    actions = {name: values.tolist() for name, values in history.actions.items() if values.any()}
    return history.items.tolist(), history.timestamps.tolist(), actions


def run(url: str, work: Callable[[HistoryStore], Awaitable[Answer]], keep: int = 65_536) -> Answer:
    """Do some work on a store, on an event loop of its own."""

    async def whole() -> Answer:
        store = open_history_store(url, keep)
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(whole())
