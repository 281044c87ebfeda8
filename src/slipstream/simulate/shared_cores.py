"""Cores that processes share in virtual time, and threads that run on them.

Whatever wants a core gets an even share of all of them, at most one core each (processor sharing,
as in `shared_clock.py`, here on the loop that serving's coroutines run on). Touch this when a
machine schedules its threads in another way.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable

from pydantic import BaseModel, ConfigDict, Field

from slipstream.simulate.virtual_time import VirtualEvent, VirtualLoop

_DONE = 1e-12  # what counts as nothing left, in seconds


class CallCosts(BaseModel):
    """Processor time that a request takes besides its pass, and the cores that it takes it from.

    Every request pays it, also those ranked in one pass. Without `cores` every instance has a core
    of its own, and routers and clients are on other machines.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    # Measured over the serving benchmark's low rates (benchmarks/protocols/simulate.md).
    instance_seconds: float = Field(
        default=6e-4, ge=0, description="event loop of the instance: HTTP, JSON, history"
    )
    router_seconds: float = Field(default=3.5e-4, ge=0, description="with shared cores only")
    client_seconds: float = Field(default=0.0, ge=0, description="with shared cores only")
    cores: int | None = Field(
        default=None, ge=1, le=4096, description="that instances, router and clients share"
    )


class SharedCores:
    """So many cores; work begun on them ends when it has had its seconds of a core."""

    def __init__(self, loop: VirtualLoop, cores: int) -> None:
        self.loop, self.cores = loop, cores
        self._given = 0.0  # seconds that each piece of work has had that was always there
        self._since = 0.0
        self._ends: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._next: VirtualEvent | None = None

    def begin(self, seconds: float, done: Callable[[], None]) -> None:
        """Begin work of so many seconds of a core; `done` is called at its end."""
        self._advance()
        self._order += 1
        heapq.heappush(self._ends, (self._given + seconds, self._order, done))
        self._plan()

    def _speed(self) -> float:
        return min(1.0, self.cores / len(self._ends)) if self._ends else 0.0

    def _advance(self) -> None:
        now = self.loop.now
        self._given += (now - self._since) * self._speed()
        self._since = now

    def _plan(self) -> None:
        """Call again when the next piece of work ends, if nothing begins before."""
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if self._ends:
            left = max(0.0, self._ends[0][0] - self._given) / self._speed()
            self._next = self.loop.call_at(self.loop.now + left, self._end)

    def _end(self) -> None:
        self._next = None
        self._advance()
        ended = []
        at_least = self._ends[0][0]  # it was its time, whatever rounding says
        while self._ends and self._ends[0][0] <= max(at_least, self._given) + _DONE:
            ended.append(heapq.heappop(self._ends)[2])
        self._given = max(self._given, at_least)
        self._plan()
        for done in ended:
            done()


class CoreThread:
    """A thread of a process, as an event loop: one piece of work after the other."""

    def __init__(self, cores: SharedCores) -> None:
        self.cores = cores
        self._waiting: deque[tuple[float, asyncio.Future[None]]] = deque()
        self._runs = False

    def work(self, seconds: float) -> "asyncio.Future[None]":
        """Return a future that is done when the thread has done this work, after all before it."""
        future: asyncio.Future[None] = self.cores.loop.create_future()
        if seconds <= 0.0 and not self._runs:
            future.set_result(None)
            return future
        self._waiting.append((seconds, future))
        if not self._runs:
            self._go_on()
        return future

    def _go_on(self) -> None:
        self._runs = bool(self._waiting)
        if self._runs:
            self.cores.begin(self._waiting[0][0], self._ended)

    def _ended(self) -> None:
        _, future = self._waiting.popleft()
        if not future.done():
            future.set_result(None)
        self._go_on()
