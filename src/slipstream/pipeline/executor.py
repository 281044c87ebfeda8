"""Runs any schedule, lane by lane: each lane is a thread with its own fixed order.

The compute lane is the caller. A stage may have threads of its own beside its lane's. A thread
takes its next task, waits until everything the schedule lists for it has ended, runs it, and
records it. Nothing queues without bound: a stage's `ahead` is how far it may run before the update.
The caller iterates over `steps()`; between two steps it may look at anything, and calls `settle()`
first where it looks at tables.

Every way to end joins every thread: the data ends (`end`), the caller stops iterating, a stage
raises (its error reaches the caller; what was updated is still written back). Where lanes talk to
other ranks, a caller that stops lets them run to where all ranks' lanes stop anyway; after an error
every lane closes its process groups as it leaves, so that no other rank waits for it. Touch this
when a pipeline starts, waits or ends in another way.
"""

import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager

from slipstream.pipeline import hazards
from slipstream.pipeline.hazards import LaneThread, Task
from slipstream.pipeline.ledger import FOREVER, Ledger
from slipstream.pipeline.schedule import Lane, Schedule, Stage
from slipstream.pipeline.trace import Interval, Trace

# Seconds lanes get to leave. They return as soon as all have left, so large limits cost nothing.
STOP_SECONDS = 60.0  # after an orderly stop: the lanes of other ranks may be slow
ERROR_SECONDS = 8.0  # after an error: a lane may be stuck in a collective that never ends

# (step, micro-batch) -> None; the first stage returns the step's number of micro-batches
Action = Callable[[int, int], int | None]
Delay = Callable[[Task], float]


class _Leave(Exception):
    """The lane has nothing left to do."""


class Executor:
    """Runs `actions`, one per stage of `schedule`, from step `first` on.

    `closers` close the process groups of a lane when it leaves after an error.
    """

    def __init__(
        self,
        schedule: Schedule,
        actions: Mapping[str, Action],
        *,
        trace: Trace | None = None,
        delay: Delay | None = None,
        closers: Mapping[Lane, Callable[[], None]] | None = None,
        first: int = 0,
    ) -> None:
        if broken := hazards.problems(schedule):
            raise ValueError(
                f"schedule '{schedule.name}' does not keep its promise: {'; '.join(broken)}"
            )
        if missing := [stage.name for stage in schedule.stages if stage.name not in actions]:
            raise ValueError(f"schedule '{schedule.name}' has stages without action: {missing}")
        self.schedule, self.actions, self.first = schedule, actions, first
        self.trace = trace or Trace()
        self._delay, self._closers = delay, dict(closers or {})
        self._first = schedule.stages[0].name
        self._stages = {stage.name: stage for stage in schedule.stages}
        threads = hazards.threads_of(schedule)
        self._busy = {(each.lane, each.of, each.turn): threading.Lock() for each in threads}
        threaded = [] if schedule.serial else [t for t in threads if t.lane != Lane.COMPUTE]
        self._ledger = Ledger(schedule, len(threaded), first)
        self._threads = [
            threading.Thread(
                target=self._follow, args=(each,), name=f"slipstream-{each.lane}", daemon=True
            )
            for each in threaded
        ]

    def steps(self) -> Generator[int, None, None]:
        """Run step after step until the data ends; yield each step once it is updated."""
        for thread in self._threads:
            thread.start()
        try:
            step = self.first
            while self._step(step):
                yield step
                step += 1
        except GeneratorExit:
            self._shut(finished=False)
            raise
        except BaseException as error:
            self._ledger.stop(error)
            self._shut(finished=False)
            raise
        self._shut(finished=True)

    def end(self, step: int) -> None:
        """Declare that there is no step `step`; everything before it is still done."""
        self._ledger.end(step)

    def settle(self, step: int) -> None:
        """Wait until the rows of `step`, the newest updated one, are back in the tables."""
        if (
            not self._ledger.wait(Task(self.schedule.stages[-1].name, step))
            and self._ledger.error is not None
        ):
            raise self._ledger.error

    @contextmanager
    def pause(self, *lanes: Lane) -> Iterator[None]:
        """Hold all threads of these lanes back between two of their tasks."""
        with ExitStack() as held:
            for (lane, _, _), lock in self._busy.items():
                if lane in lanes:
                    held.enter_context(lock)
            yield

    def _shut(self, *, finished: bool) -> None:
        """Join all lanes and write back what was updated; raise a lane's error if it is new."""
        ledger, known_error = self._ledger, self._ledger.error
        seconds = ERROR_SECONDS if known_error is not None else STOP_SECONDS
        if known_error is None and finished:
            seconds = float("inf")
        elif known_error is None and self._closers:
            ledger.close()
        elif known_error is None:
            ledger.stop()
        if not ledger.all_left(seconds):
            ledger.stop(known_error or RuntimeError(f"a lane did not stop within {seconds:.0f} s"))
            ledger.all_left(ERROR_SECONDS)
        if ledger.all_left(0.0):
            for thread in self._threads:
                thread.join()
            self._drain()
        else:
            alive = ", ".join(thread.name for thread in self._threads if thread.is_alive())
            ledger.stop(RuntimeError(f"{alive} did not stop within {ERROR_SECONDS:.0f} s"))
        if known_error is None and ledger.error is not None:
            raise ledger.error

    def _drain(self) -> None:
        """Finish in the caller's thread what was updated and not yet written back.

        A task that fails holds up only the tasks that need it.
        """
        stages, failed = [stage for stage in self.schedule.stages if stage.drains], set[Task]()
        while ready := [
            (stage, task)
            for stage in stages
            for task in self._ledger.unfinished(stage.name)
            if task not in failed
        ]:
            stage, task = min(ready, key=lambda each: (each[1].step, each[1].micro))
            try:
                self._run(stage, task, time.perf_counter(), None)
            except BaseException as error:
                self._ledger.stop(error)
                failed.add(task)

    def _step(self, step: int) -> bool:
        """Run one step of the compute lane (a serial schedule: of all); False if there is none."""
        if self.schedule.serial:
            return self._serial_step(step)
        try:
            for stage in self.schedule.stages:
                if stage.lane == Lane.COMPUTE:
                    self._stage(stage, step)
        except _Leave:
            if self._ledger.error is not None:
                raise self._ledger.error from None
            return False
        return step < self._ledger.last

    def _serial_step(self, step: int) -> bool:
        first, *others = self.schedule.stages
        self._run(first, Task(first.name, step), time.perf_counter(), None)
        for task in hazards.serial_order(tuple(others), step, self._ledger.micros(step)):
            if step >= self._ledger.last:
                break
            self._run(self._stages[task.stage], task, time.perf_counter(), None)
        return step < self._ledger.last

    def _follow(self, thread: LaneThread) -> None:
        """Run a thread's tasks until there are none left."""
        try:
            for stage, step in thread.order(self.first, FOREVER):
                if step - stage.ahead >= self._ledger.last:
                    break
                self._stage(stage, step)
        except _Leave:
            pass
        except BaseException as error:
            self._ledger.stop(error)
        if self._ledger.error is not None and thread.lane in self._closers:
            self._closers[thread.lane]()
        self._ledger.leave()

    def _stage(self, stage: Stage, step: int) -> None:
        """Run one stage of one step for all micro-batches; skip a step that does not exist."""
        ledger, ready = self._ledger, time.perf_counter()
        if stage.name != self._first and not ledger.wait(Task(self._first, step)):
            return self._skip(step)
        for micro in range(ledger.micros(step) if stage.each else 1):
            task, cause = Task(stage.name, step, micro), None
            for need in ledger.needs(task):
                if not ledger.wait(need):
                    return self._skip(step)
                if ledger.ended_at(need) > max(ready, ledger.ended_at(cause) if cause else 0.0):
                    cause = need
            if step >= ledger.last:
                return None
            self._run(stage, task, ready, cause)
            ready = time.perf_counter()
        return None

    def _skip(self, step: int) -> None:
        if self._ledger.stopping or step < self._ledger.last:
            raise _Leave

    def _run(self, stage: Stage, task: Task, ready: float, cause: Task | None) -> None:
        if self._delay is not None:
            time.sleep(self._delay(task))
        with self._busy[stage.lane, stage.threads, task.step % stage.threads]:
            if self._ledger.stopping and not stage.drains:
                raise _Leave
            begin, spent = time.perf_counter(), time.thread_time()
            result = self.actions[stage.name](task.step, task.micro)
            end, cpu = time.perf_counter(), time.thread_time() - spent
        by_caller = threading.current_thread() not in self._threads
        waited_for = None if cause is None else (cause.stage, cause.step, cause.micro)
        place = (stage.lane, stage.name, task.step, task.micro)
        self.trace.add(Interval(*place, ready, begin, end, by_caller, waited_for, cpu))
        self._ledger.record(task, end, result if stage.name == self._first else None)
