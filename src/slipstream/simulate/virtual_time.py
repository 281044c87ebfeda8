"""Virtual time: an event loop that jumps from event to event, and clocks that read it.

Coroutines of serving run on it unchanged; nothing sleeps, nothing is threaded. `VirtualClock` is
the clock of one process: while a step of its compute thread is accounted for, it stands at that
step's beginning. Touch this when serving waits for another kind of event.
"""

import asyncio
import contextlib
import gc
import heapq
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextvars import Context
from typing import Any, TypeVar

from slipstream.serving.clock import Clock

Result = TypeVar("Result")
COLLECT_AFTER = 50_000  # new objects; looking after 700 finds nothing and takes time


class VirtualEvent:
    """A call that is due; asyncio may cancel it."""

    __slots__ = ("args", "callback", "cancelled_", "context")

    def __init__(self, callback: Callable[..., object], args: Any, context: Any) -> None:
        self.callback, self.args, self.context = callback, args, context
        self.cancelled_ = False

    def cancel(self) -> None:
        """Skip the call when its time comes."""
        self.cancelled_ = True

    def cancelled(self) -> bool:
        """Return whether it was cancelled."""
        return self.cancelled_


class VirtualLoop(asyncio.AbstractEventLoop):
    """The part of an event loop that serving's policies use, in virtual seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._ready: deque[VirtualEvent] = deque()
        self._timers: list[tuple[float, int, VirtualEvent]] = []
        self._order = 0
        self.errors: list[BaseException] = []

    def time(self) -> float:
        """Return virtual seconds since the start."""
        return self.now

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> VirtualEvent:
        """Call a function as soon as what runs now has ended."""
        event = VirtualEvent(callback, args, context)
        self._ready.append(event)
        return event

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> VirtualEvent:
        """Call a function at a virtual time."""
        event = VirtualEvent(callback, args, context)
        self._order += 1
        heapq.heappush(self._timers, (when, self._order, event))
        return event

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> VirtualEvent:
        """Call a function after virtual seconds."""
        return self.call_at(self.now + delay, callback, *args, context=context)

    def create_future(self) -> "asyncio.Future[Any]":
        """Return a future of this loop."""
        return asyncio.Future(loop=self)

    def pause(self, seconds: float) -> "asyncio.Future[None]":
        """Return a future that is done after virtual seconds."""
        future: asyncio.Future[None] = asyncio.Future(loop=self)
        self.call_at(self.now + seconds, _finish, future)
        return future

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Result], **options: Any
    ) -> "asyncio.Task[Result]":
        """Run a coroutine."""
        return asyncio.Task(coro, loop=self)

    def get_debug(self) -> bool:
        """Return False: asyncio asks."""
        return False

    def is_running(self) -> bool:
        """Return True: asyncio asks."""
        return True

    def is_closed(self) -> bool:
        """Return False: asyncio asks."""
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Keep an error that nobody waits for; `run_until_idle` raises it."""
        error = context.get("exception")
        self.errors.append(error or RuntimeError(context.get("message", "")))

    def run_until_idle(self, until: float = float("inf")) -> None:
        """Run every event up to a virtual time; raise an error that nobody waited for."""
        with _rare_collections():
            self._run(until)

    def _run(self, until: float) -> None:
        events._set_running_loop(self)
        ready, timers = self._ready, self._timers
        try:
            while True:
                while ready:
                    event = ready.popleft()
                    if event.cancelled_:
                        continue
                    if event.context is None:
                        event.callback(*event.args)
                    else:
                        event.context.run(event.callback, *event.args)
                if self.errors:
                    raise self.errors[0]
                if not timers or timers[0][0] > until:
                    return
                self.now = timers[0][0]
                while timers and timers[0][0] <= self.now:
                    ready.append(heapq.heappop(timers)[2])
        finally:
            events._set_running_loop(None)


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Look for unreachable cycles less often: most objects of a request go without that."""
    usual = gc.get_threshold()
    if 0 < usual[0] < COLLECT_AFTER:
        gc.set_threshold(COLLECT_AFTER, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)


def _finish(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


class VirtualClock(Clock):
    """The clock of one process on a virtual loop."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop, self.shift = loop, 0.0

    def now(self) -> float:
        """Return virtual seconds; a shift moves them while a step is accounted for."""
        return self.loop.now + self.shift

    def wall_time(self) -> float:
        """Return virtual seconds since 1970."""
        return self.loop.now + self.shift
