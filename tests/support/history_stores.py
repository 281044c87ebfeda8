"""Histories of numbers and stores to keep them in, for the tests of the history stores."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import numpy as np

from slipstream.history.history_store import HistoryStore, open_history_store
from slipstream.history.user_history import History

Answer = TypeVar("Answer")


def behaviours(
    items: list[int], timestamps: list[int] | None = None, **actions: list[float]
) -> History:
    """A history; the times are the items where none are given."""
    return History(
        np.array(items, dtype=np.int64),
        np.array(timestamps if timestamps is not None else items, dtype=np.int64),
        {name: np.array(values, dtype=np.float32) for name, values in actions.items()},
    )


def run(
    url: str,
    work: Callable[[HistoryStore], Awaitable[Answer]],
    actions: tuple[str, ...] = ("click", "like"),
    keep: int = 65_536,
) -> Answer:
    """Do some work on a store, on an event loop of its own."""

    async def whole() -> Answer:
        store = open_history_store(url, actions, keep)
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(whole())
