"""The one engine: runs any schedule, lane by lane, each lane a thread with its own fixed order; the
compute lane is the caller.

A lane takes its next task, waits until everything the schedule lists for it has ended, runs it, and
says so. Nothing queues without bound: a stage's `ahead` is how far it may run before the update.
The caller iterates over `steps()`; between two steps it may look at anything, and `settle()` first
where it looks at tables.

Ways to end, all of which join every thread: the data ends (`end`), the caller stops iterating, a
stage raises (its error reaches the caller; what was updated is still written back). Where lanes
talk to other ranks, a caller that stops lets them run to where all ranks' lanes stop anyway; after
an error every lane gives up its process groups as it leaves, so that no peer waits for it.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from slipstream.pipeline import hazards
from slipstream.pipeline.hazards import Task
from slipstream.pipeline.ledger import FOREVER, Ledger
from slipstream.pipeline.schedule import Lane, Schedule, Stage
from slipstream.pipeline.trace import Interval, Trace

# seconds lanes get to leave after a stop, and once more after being told to drop everything
PATIENCE = 4.0

Action = Callable[
    [int, int], int | None
]  # (step, micro-batch); the first stage returns the number of micro-batches
Delay = Callable[[Task], float]


class _Leave(Exception):
    """The lane has nothing left to do."""


class Executor:
    """Runs `actions`, one per stage of `schedule`, from step `first` on. `give_up` closes a lane's
    groups after an error.
    """

    def __init__(
        self,
        schedule: Schedule,
        actions: Mapping[str, Action],
        *,
        trace: Trace | None = None,
        delay: Delay | None = None,
        give_up: Mapping[Lane, Callable[[], None]] | None = None,
        first: int = 0,
    ) -> None:
        if broken := hazards.problems(schedule):
            raise ValueError(
                f"schedule '{schedule.name}' does not keep its promise: {'; '.join(broken)}"
            )
        self.schedule, self.actions, self.trace, self.first = (
            schedule,
            actions,
            trace or Trace(),
            first,
        )
        self._delay, self._give_up, self._first = (
            delay,
            dict(give_up or {}),
            schedule.stages[0].name,
        )
        self._stages = {stage.name: stage for stage in schedule.stages}
        lanes = dict.fromkeys(stage.lane for stage in schedule.stages)
        self._busy = {lane: threading.Lock() for lane in lanes}
        threaded = [] if schedule.serial else [lane for lane in lanes if lane != Lane.COMPUTE]
        self._ledger = Ledger(schedule, len(threaded), first)
        self._threads = [
            threading.Thread(
                target=self._lane, args=(lane,), name=f"slipstream-{lane}", daemon=True
            )
            for lane in threaded
        ]

    def steps(self) -> Iterator[int]:
        """Run step after step until the data ends; yields each step once it is updated."""
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
        """There is no step `step`; everything before it is still done."""
        self._ledger.end(step)

    def settle(self, step: int) -> None:
        """Wait until the rows of `step`, the newest updated one, are back in the tables."""
        if (
            not self._ledger.wait(Task(self.schedule.stages[-1].name, step))
            and self._ledger.error is not None
        ):
            raise self._ledger.error

    @contextmanager
    def pause(self, lane: Lane) -> Iterator[None]:
        """Hold a lane back between two of its tasks."""
        with self._busy[lane]:
            yield

    def _shut(self, *, finished: bool) -> None:
        """Join all lanes and write back what was updated. Raises what a lane raised unless the
        caller is told already.
        """
        ledger, told = self._ledger, self._ledger.error
        if told is None and not finished:
            if self._give_up:
                ledger.close()
            else:
                ledger.stop()
        patience = float("inf") if told is None and finished else PATIENCE
        if not ledger.all_left(patience):
            ledger.stop(told or RuntimeError("a lane did not stop in time"))
            ledger.all_left(PATIENCE)
        for thread in self._threads:
            thread.join(PATIENCE)
        if alive := [thread.name for thread in self._threads if thread.is_alive()]:
            ledger.stop(
                RuntimeError(f"{', '.join(alive)} did not stop within {2 * PATIENCE:.0f} s")
            )
        else:
            self._drain()
        if told is None and ledger.error is not None:
            raise ledger.error

    def _drain(self) -> None:
        """Finish, in the caller's thread, what was updated and not yet written. What fails holds up
        only what needs it.
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
        """One step of the compute lane (of every lane, in a serial schedule); says whether there
        was one.
        """
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

    def _lane(self, lane: Lane) -> None:
        """A lane's whole life."""
        stages = [stage for stage in self.schedule.stages if stage.lane == lane]
        try:
            for stage, step in hazards.lane_order(stages, self.first, FOREVER):
                if step - stage.ahead >= self._ledger.last:
                    break
                self._stage(stage, step)
        except _Leave:
            pass
        except BaseException as error:
            self._ledger.stop(error)
        if self._ledger.error is not None and lane in self._give_up:
            self._give_up[lane]()
        self._ledger.leave()

    def _stage(self, stage: Stage, step: int) -> None:
        """All micro-batches of one stage of one step; a step that does not exist is passed over."""
        ledger, asked = self._ledger, time.perf_counter()
        if stage.name != self._first and not ledger.wait(Task(self._first, step)):
            return self._pass_over(step)
        for micro in range(ledger.micros(step) if stage.each else 1):
            task, cause = Task(stage.name, step, micro), None
            for need in ledger.needs(task):
                if not ledger.wait(need):
                    return self._pass_over(step)
                if ledger.ended_at(need) > max(asked, ledger.ended_at(cause) if cause else 0.0):
                    cause = need
            if step >= ledger.last:
                return None
            self._run(stage, task, asked, cause)
            asked = time.perf_counter()
        return None

    def _pass_over(self, step: int) -> None:
        if self._ledger.stopping or step < self._ledger.last:
            raise _Leave

    def _run(self, stage: Stage, task: Task, asked: float, cause: Task | None) -> None:
        if self._delay is not None:
            time.sleep(self._delay(task))
        with self._busy[stage.lane]:
            if self._ledger.stopping and not stage.drains:
                raise _Leave
            begin = time.perf_counter()
            result = self.actions[stage.name](task.step, task.micro)
            end = time.perf_counter()
        by_caller = threading.current_thread() not in self._threads
        waited_for = None if cause is None else (cause.stage, cause.step, cause.micro)
        self.trace.add(
            Interval(
                stage.lane,
                stage.name,
                task.step,
                task.micro,
                asked,
                begin,
                end,
                by_caller,
                waited_for,
            )
        )
        self._ledger.note(task, end, result if stage.name == self._first else None)
