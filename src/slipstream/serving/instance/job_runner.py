"""Between the event loop and the compute thread: submit a job, wait for its result, learn its time.

Touch this when a coroutine waits for computed work in another way; the order of jobs is in
scheduler.py.
"""

import asyncio
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from slipstream.serving.instance.cost_model import CostModel
from slipstream.serving.instance.scheduler import Job, Kind, Scheduler
from slipstream.serving.request_errors import OverloadError

OnDone = Callable[[Any, BaseException | None], None]


class RecentWaits:
    """How long requests waited in the queue during the last seconds."""

    def __init__(self, horizon: float = 5.0, most: int = 512) -> None:
        self._horizon, self._most = horizon, most
        self._waits: deque[tuple[float, float]] = deque()
        self._ascending: list[float] = []  # the same waits

    def add(self, now: float, seconds: float) -> None:
        """Note one request's wait."""
        wait = max(0.0, seconds)
        self._waits.append((now, wait))
        insort(self._ascending, wait)
        if len(self._waits) > self._most:
            self._forget_first()

    def tail(self, now: float) -> float:
        """Return the 99th percentile over the horizon, 0 where nobody waited."""
        while self._waits and now - self._waits[0][0] > self._horizon:
            self._forget_first()
        recent = self._ascending
        return recent[min(len(recent) - 1, int(0.99 * len(recent)))] if recent else 0.0

    def _forget_first(self) -> None:
        _, wait = self._waits.popleft()
        del self._ascending[bisect_left(self._ascending, wait)]


class JobRunner:
    """Runs jobs on the compute thread for coroutines of one event loop."""

    def __init__(self, scheduler: Scheduler, cost: CostModel) -> None:
        self.scheduler, self.cost, self.waits = scheduler, cost, RecentWaits()
        self.clock = scheduler.clock

    def submit(
        self,
        kind: Kind,
        deadline: float,
        seconds: float,
        on_done: OnDone,
        *,
        steps: Iterator[Any] | None = None,
        request: Any = None,
        extra_seconds: float = 0.0,
        bulk: bool = False,
    ) -> Job:
        """Queue a job predicted to take `seconds`; `on_done` runs on this loop when it has ended.

        It is given up `extra_seconds` after its deadline.
        """
        job = Job(kind, deadline, seconds, _on_this_loop(on_done), steps=steps, request=request)
        job.expires, job.bulk = deadline + extra_seconds, bulk
        self.scheduler.submit(job)
        return job

    async def run(
        self,
        deadline: float,
        seconds: float,
        *,
        kind: Kind = Kind.RANK,
        steps: Iterator[Any] | None = None,
        request: Any = None,
        learn: str | None = None,
        bulk: bool = False,
        spent: Callable[[float], None] | None = None,
        started: Callable[[Job], None] | None = None,
        release: Callable[[BaseException | None], None] | None = None,
    ) -> Any:
        """Run one job of a request and return its result.

        `learn` is the kind of work the cost model learns from its time; `spent` is told that time.
        `bulk` work lets other requests go first. `started` is told the job when it is queued.
        `release` runs on this loop when the compute thread no longer uses the job's buffers,
        whatever became of the request; it is told the error that ended the job, or None.
        """
        result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        submitted = self.clock.now()

        def on_done(value: Any, error: BaseException | None) -> None:
            if release is not None:
                release(error)
            if error is None:
                if learn is not None:
                    self.cost.observe(learn, seconds, job.spent)
                if spent is not None:
                    spent(job.spent)
                now = self.clock.now()
                if kind == Kind.RANK and not bulk:
                    self.waits.add(now, now - submitted - job.spent)
            if result.done():
                return
            if error is None:
                result.set_result(value)
            else:
                result.set_exception(error)

        try:
            job = self.submit(
                kind, deadline, seconds, on_done, steps=steps, request=request, bulk=bulk
            )
        except OverloadError as error:
            if release is not None:
                release(error)
            raise
        if started is not None:
            started(job)
        try:
            return await result
        except asyncio.CancelledError:
            self.scheduler.cancel(job)
            raise


def _on_this_loop(on_done: OnDone) -> OnDone:
    """Return a callback for the compute thread that runs `on_done` on the present event loop."""
    loop = asyncio.get_running_loop()

    def call(value: Any, error: BaseException | None) -> None:
        if not loop.is_closed():  # a closed loop has nobody waiting
            loop.call_soon_threadsafe(on_done, value, error)

    return call
