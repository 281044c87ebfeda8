"""One instance in virtual time: serving's `Instance`, its compute thread played step by step.

A step is chosen when the thread is free and accounted for when its time is over, so that requests
which come meanwhile find the queue as they would on a real machine. Touch this when the compute
thread works in another way.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from slipstream.serving.instance.instance import Instance
from slipstream.serving.instance.instance_config import InstanceConfig
from slipstream.serving.instance.scheduler import Job
from slipstream.serving.router.balancer import InstanceState
from slipstream.simulate.shared_cores import CoreThread, SharedCores
from slipstream.simulate.simulated_engine import EngineSpec, SimulatedEngine, UnbackedMemory
from slipstream.simulate.virtual_time import VirtualClock, VirtualLoop


class _Wake:
    """Stands for the scheduler's condition: whoever notifies it starts the compute thread.

    Whoever looks at the queue first sees the steps accounted for that have ended by now.
    """

    def __init__(self, catch_up: Callable[[], None], notify: Callable[[], None]) -> None:
        self._catch_up, self.notify = catch_up, notify

    def __enter__(self) -> None:
        self._catch_up()

    def __exit__(self, *_: object) -> None:
        pass


class _Steps:
    """The steps of a job, run ahead of their time and handed over when it is over."""

    def __init__(self, steps: Iterator[Any], node: "SimulatedNode") -> None:
        self._steps, self._node = steps, node
        self.ahead: deque[tuple[float, Any, BaseException | None]] = deque()

    def run_ahead(self, all_of_them: bool) -> None:
        """Run the next step, or all, and keep seconds and outcomes."""
        engine = self._node.engine
        while not self.ahead or (all_of_them and self.ahead[-1][2] is None):
            engine.owed, value, failed = 0.0, None, None
            try:
                value = next(self._steps)
            except BaseException as error:
                failed = error
            self.ahead.append((engine.owed, value, failed))
            failed = None  # else the error's traceback and this frame keep each other

    def __iter__(self) -> "_Steps":
        return self

    def __next__(self) -> Any:
        seconds, value, error = self.ahead.popleft()
        self._node.clock.shift += seconds  # from the step's beginning to its end
        if error is None:
            return value
        try:
            raise error
        finally:
            error = None  # else its traceback and this frame keep each other


class SimulatedNode:
    """A process with one instance; it may be slow, drain, die and come back.

    Its compute thread has a core of its own, or runs on `cores`, and so does its event loop. With
    a core of its own, `request_seconds` of the event loop lengthen the passes.
    """

    def __init__(
        self,
        number: int,
        spec: EngineSpec,
        config: InstanceConfig,
        loop: VirtualLoop,
        seed: int,
        *,
        request_seconds: float = 0.0,
        cores: SharedCores | None = None,
    ) -> None:
        self.cores, self.event_loop = cores, None if cores is None else CoreThread(cores)
        self.request_seconds = 0.0 if cores is not None else request_seconds
        self.state = InstanceState(f"i-{number}", f"http://i-{number}:1")
        self.spec, self.config, self.loop, self.seed = spec, config, loop, seed
        self.memory, self.slowness, self.lives = UnbackedMemory(), 1.0, 0
        self.inside: set[asyncio.Task[Any]] = set()  # requests that this process holds
        self.counts: dict[str, float] = {}  # of earlier processes
        self.busy_seconds = 0.0
        self.alive = False
        self.start()

    def start(self) -> None:
        """Start a process: the device cache is empty, the host tier as it was left."""
        self.lives += 1
        self.clock = VirtualClock(self.loop)
        self.engine = SimulatedEngine(self.spec, hash((self.seed, self.state.seed, self.lives)))
        self.instance = Instance(
            self.engine,
            self.config,
            self.spec.cost_model(),
            self.clock,
            memory=self.memory,
            threaded=False,
        )
        run_batch = self.engine.rank_batch

        def timed(queries: Sequence[Any]) -> Sequence[Any]:
            self.clock.shift = 0.0
            return run_batch(queries)

        self.scheduler = self.instance.scheduler
        self.scheduler._run_batch = timed
        self.scheduler._wake = _Wake(self._catch_up, self._notify)  # type: ignore[assignment]
        self._busy = self._noticed = self._accounting = False
        self._alone: Job | None = None  # the only job queued: its steps follow each other
        self._alone_since, self._turn = 0.0, 0
        self.alive = True

    def die(self) -> None:
        """End the process at once: what it holds is lost."""
        self.alive = False
        self._keep_counts()
        for task in list(self.inside):
            task.cancel("lost")

    def _keep_counts(self) -> None:
        self.counts = self._added()
        self.busy_seconds += sum(self.scheduler.busy_seconds.values())

    def _added(self) -> dict[str, float]:
        """Return the counters of earlier processes and of this one."""
        found, inflight = dict(self.counts), self.instance.prefixes.inflight
        filled = {
            f"filled_{name}": getattr(inflight, name)
            for name in ("computed", "extended", "extended_from_host", "reloaded")
        }
        for name, count in {**self.instance.counts, **filled}.items():
            found[name] = found.get(name, 0) + count
        return found

    def totals(self) -> dict[str, float]:
        """Return the counters of all processes of this node so far."""
        return self._added() if self.alive else dict(self.counts)

    def busy(self) -> float:
        """Return the seconds that its compute threads worked."""
        now = sum(self.scheduler.busy_seconds.values()) if self.alive else 0.0
        return self.busy_seconds + now

    # ---- the compute thread ----------------------------------------------------------------------

    def _notify(self) -> None:
        if self._alone is not None:
            self._end_alone()
        elif not self._busy and not self._noticed:
            self._noticed = True
            self.loop.call_soon(self._choose, self.lives)

    def _choose(self, life: int) -> None:
        """Choose the next step and let its time pass."""
        if life != self.lives or not self.alive:
            return
        self._noticed = False
        if self._busy:
            return
        batch, expired = self.scheduler.choose()
        if not batch:
            return
        self._busy, self._turn = True, self._turn + 1
        self.engine.slowness = self.slowness
        first, seconds = batch[0], 0.0
        if first.cancelled or expired:
            pass
        elif first.steps is None:
            seconds = self.engine.batch_seconds([job.request for job in batch])
            seconds += len(batch) * self.request_seconds * self.slowness
        else:
            if not isinstance(first.steps, _Steps):
                first.steps = _Steps(first.steps, self)
            # On shared cores nobody knows beforehand when a step ends.
            alone = len(self.scheduler._jobs) == 1 and self.cores is None
            first.steps.run_ahead(alone)
            if alone:
                self._alone, self._alone_since = first, self.loop.now
                whole = sum(step[0] for step in first.steps.ahead)
                self.loop.call_at(self.loop.now + whole, self._all_done, life, self._turn)
                return
            seconds = first.steps.ahead[0][0]
        if self.cores is not None:
            ended = partial(self._account_shared, life, self._turn, batch, expired, self.loop.now)
            self.cores.begin(seconds, ended)
            return
        end = self.loop.now + seconds
        self.loop.call_at(end, self._account, life, self._turn, batch, expired, seconds)

    def _account_shared(
        self, life: int, turn: int, batch: Sequence[Job], expired: bool, begin: float
    ) -> None:
        """End a step on shared cores: it took what passed, not what it needed."""
        seconds, steps = self.loop.now - begin, batch[0].steps
        if isinstance(steps, _Steps) and steps.ahead:
            steps.ahead[0] = (seconds, *steps.ahead[0][1:])
        self._account(life, turn, batch, expired, seconds)

    def _account(
        self, life: int, turn: int, batch: Sequence[Job], expired: bool, seconds: float
    ) -> None:
        """End a step: the scheduler sees it begin so many seconds ago and end now."""
        if life != self.lives or not self.alive or turn != self._turn:
            return
        self._run(batch, expired, -seconds)
        self._busy = False
        self._choose(life)

    def _run(self, batch: Sequence[Job], expired: bool, shift: float) -> None:
        self._accounting, self.clock.shift = True, shift
        self.scheduler.run(batch, expired)
        self._accounting, self.clock.shift = False, 0.0

    # A job that is alone in the queue needs no choice between its steps: they are accounted for
    # when somebody looks at the queue, or at their end.

    def _catch_up(self) -> None:
        """Account for the steps of the only job that have ended by now."""
        job = self._alone
        if job is None or self._accounting:
            return
        steps, now = job.steps, self.loop.now
        assert isinstance(steps, _Steps)
        while steps.ahead and self._alone_since + steps.ahead[0][0] <= now + 1e-12:
            begin = self._alone_since
            self._alone_since += steps.ahead[0][0]
            self._run([job], False, begin - now)

    def _end_alone(self) -> None:
        """Let the present step of the only job end; then the next is chosen again."""
        job, self._alone, self._turn = self._alone, None, self._turn + 1
        assert job is not None and isinstance(job.steps, _Steps)
        if not job.steps.ahead:
            self._busy = False
            self._notify()
            return
        seconds = job.steps.ahead[0][0]
        end = max(self.loop.now, self._alone_since + seconds)
        arguments = (self.lives, self._turn, [job], False, seconds)
        self.loop.call_at(end, self._account, *arguments)

    def _all_done(self, life: int, turn: int) -> None:
        """End the only job, unless others have come meanwhile."""
        if life != self.lives or not self.alive or turn != self._turn:
            return
        self._catch_up()
        self._alone, self._busy = None, False
        self._choose(life)
