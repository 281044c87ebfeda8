"""The limits of a server: body sizes, rates and deadlines. Every limit is finite.

Rates are kept in a small file in shared memory, so all routers of a machine count together. Touch
this when a server accepts or refuses callers in another way; keys are in api_keys.py, connections
in connection_table.py.
"""

import fcntl
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import xxhash

SLOTS = 32_768  # callers counted apart: keys have slots of their own, addresses share the others
CANDIDATES_PER_TOKEN = 100  # a request costs 1, and 1 more for each hundred items beyond it scores


@dataclass(frozen=True)
class Limits:
    """The limits of one server. Rates are per API key where keys are set, else per address."""

    max_body_bytes: int = 4 * 2**20
    all_bodies_bytes: int = 256 * 2**20  # of all requests under way
    body_seconds: float = 15.0  # for a whole body
    deadline_ms: float = 1_000.0
    max_deadline_ms: float = 60_000.0
    requests_per_second: float | None = None
    burst: int = 100


def request_cost(scored: int) -> float:
    """Return what a request that scores so many items costs against the rate."""
    return max(1.0, scored / CANDIDATES_PER_TOKEN)


class RateLimit:
    """Lets each caller send `burst` at once and its rate in the long run (a leaky bucket, GCRA).

    Of a caller one number is kept: the moment at which everything it has taken is paid for.
    """

    def __init__(
        self,
        limits: Limits,
        path: str | Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`path` is the file that the routers of a machine share; without, it counts alone."""
        self._limits, self._clock = limits, clock
        self._file = -1
        if path is not None:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.truncate(self._file, 8 * SLOTS)
        self._paid_at = memoryview(mmap.mmap(self._file, 8 * SLOTS)).cast("d")

    def take(self, caller: int | str, cost: float = 1.0, rate: float | None = None) -> float:
        """Take from a caller's allowance: 0 when the request may pass, else the seconds to wait.

        A caller is the number of a key or an address. What costs more than the burst passes when
        nothing else was taken, and is paid for afterwards.
        """
        rate = rate if rate is not None else self._limits.requests_per_second
        if rate is None:
            return 0.0
        slot = caller if isinstance(caller, int) else _slot_of_address(caller)
        now, credit = self._clock(), self._limits.burst / rate
        locked = self._lock(slot)
        try:
            paid_at = max(self._paid_at[slot], now)
            wait = paid_at + min(cost / rate, credit) - now - credit
            if wait > 1e-9:
                return wait
            self._paid_at[slot] = paid_at + cost / rate
            return 0.0
        finally:
            if locked:
                fcntl.lockf(self._file, fcntl.LOCK_UN, 8, 8 * slot)

    def _lock(self, slot: int) -> bool:
        """Lock a caller's number against other processes.

        Not for long: a process that was stopped holds it, and then one token may be given twice.
        """
        if self._file < 0:
            return False
        for _ in range(20):
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 8, 8 * slot)
                return True
            except OSError:
                os.sched_yield()
        return False


def _slot_of_address(address: str) -> int:
    """Return the slot of a caller without a key; keys have the lower half."""
    return SLOTS // 2 + xxhash.xxh3_64_intdigest(address.encode()) % (SLOTS // 2)


class BodyBudget:
    """Bounds the bytes of all bodies under way, so that many large requests cannot fill memory."""

    def __init__(self, limits: Limits) -> None:
        self._limits, self.held = limits, 0

    def reserve(self, announced: bytes | None, chunked: bool) -> int | None:
        """Reserve room for a body and return its bytes; None: too much is under way.

        A body of unknown length reserves the most a body may have, one that is too large nothing,
        because it is not kept.
        """
        size = self._limits.max_body_bytes if chunked else int(announced or 0)
        size = size if size <= self._limits.max_body_bytes else 0
        if self.held + size > self._limits.all_bodies_bytes:
            return None
        self.held += size
        return size

    def release(self, size: int) -> None:
        """Give room back."""
        self.held -= size
