"""Small parts of an instance: recent waits, where a long history is cut, a prefix outside the
cache, a call back to the loop.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from slipstream.serving.engine.prefix import Prefix

_WINDOW_PARTS = 8


class RecentWaits:
    """How long requests waited in the queue of late."""

    def __init__(self, horizon: float = 5.0, most: int = 512) -> None:
        self._horizon = horizon
        self._seen: deque[tuple[float, float]] = deque(maxlen=most)

    def add(self, now: float, seconds: float) -> None:
        """One request's wait."""
        self._seen.append((now, max(0.0, seconds)))

    def tail(self, now: float) -> float:
        """The 99th percentile over the horizon, 0 where nobody waited."""
        recent = sorted(seconds for at, seconds in self._seen if now - at <= self._horizon)
        return recent[min(len(recent) - 1, int(0.99 * len(recent)))] if recent else 0.0


def window_start(behaviours: int, max_len: int) -> int:
    """Where a history longer than the model is cut: at a multiple of an eighth of `max_len`.

    The cut moves once in that many behaviours rather than with every one, so that prefixes stay
    usable; the model sees between 7/8 of `max_len` and all of it.
    """
    if behaviours <= max_len:
        return 0
    block = max(1, max_len // _WINDOW_PARTS)
    return min(behaviours, -(-(behaviours - max_len) // block) * block)


def keep_newest(behaviours: int, slack: float, seconds: Callable[[int], float]) -> int:
    """The most of the newest behaviours whose time fits `slack`, by bisection; 0 where none do."""
    if seconds(1) > slack:
        return 0
    low, high = 1, behaviours
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if seconds(middle) <= slack else (low, middle - 1)
    return low


class PrivatePrefix:
    """A prefix in memory of its own, for a request that found no room in the cache."""

    def __init__(self, prefix: Prefix) -> None:
        self.prefix = prefix

    def release(self) -> None:
        """Nothing to give back."""


def called_on(
    loop: asyncio.AbstractEventLoop, call: Callable[[Any, BaseException | None], None]
) -> Callable[[Any, BaseException | None], None]:
    """`call` from the compute thread, run on the loop; a loop that is gone has nobody waiting."""

    def done(value: Any, error: BaseException | None) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(call, value, error)

    return done
