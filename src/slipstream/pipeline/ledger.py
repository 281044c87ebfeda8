"""Which tasks have ended: the one place where lanes wait for each other, and learn when to stop.

Touch this when a pipeline gets a new way to end.
"""

import threading
import time
from collections.abc import Callable

from slipstream.pipeline import hazards
from slipstream.pipeline.hazards import Task
from slipstream.pipeline.schedule import PACE, Schedule

FOREVER = 1 << 62
_REMEMBERED = 64  # steps behind the newest update that are kept; no schedule looks back that far


class Ledger:
    """Ended tasks and the reasons to stop, shared by all lanes."""

    def __init__(self, schedule: Schedule, lanes: int, first: int = 0) -> None:
        self._schedule, self._lanes, self._first = schedule, lanes, first
        self._changed = threading.Condition()
        self._ended: dict[Task, float] = {}
        self._micros: dict[int, int] = {}
        self._waiting: dict[int, Task] = {}  # thread -> what it waits for
        self._waiters: dict[Task, list[threading.Event]] = {}  # set when the task has ended
        self._left = 0  # lanes that have left
        self.last = FOREVER  # steps from here on do not exist
        self.stopping = False  # leave after the running task
        self.closing = False  # leave when no lane can continue
        self.error: BaseException | None = None

    def micros(self, step: int) -> int:
        """Return the number of micro-batches of a step."""
        return self._micros[step]

    def needs(self, task: Task) -> list[Task]:
        """Return the tasks this one waits for."""
        return list(hazards.needs(self._schedule, task, self.micros, self._first))

    def ended_at(self, task: Task) -> float:
        """Return when a task ended; 0 for one that is no longer kept."""
        return self._ended.get(task, 0.0)

    def record(self, task: Task, ended: float, micros: int | None) -> None:
        """Record that a task has ended; the first stage of a step also gives `micros`."""
        with self._changed:
            if micros is not None:
                self._micros[task.step] = micros
            self._ended[task] = ended
            if task.stage == PACE:
                self._forget(task.step - _REMEMBERED)
            for waiter in self._waiters.pop(task, ()):
                waiter.set()

    def _forget(self, step: int) -> None:
        if step in self._micros:
            self._ended = {task: ended for task, ended in self._ended.items() if task.step > step}
            self._micros = {each: micros for each, micros in self._micros.items() if each > step}

    def wait(self, task: Task) -> bool:
        """Wait until a task has ended; return False when it never will."""
        if task in self._ended:
            return True
        me, waiter = threading.get_ident(), threading.Event()
        try:
            while True:
                with self._changed:
                    if task in self._ended:
                        return True
                    waiter.clear()
                    self._waiters.setdefault(task, []).append(waiter)
                    newly_waiting = me not in self._waiting
                    self._waiting[me] = task
                    if (
                        self.stopping
                        or task.step >= self.last
                        or (self.closing and self._no_lane_can_continue())
                    ):
                        return False
                    if self.closing and newly_waiting:
                        self._wake_all()
                waiter.wait(timeout=1.0)
        finally:
            with self._changed:
                self._waiting.pop(me, None)

    def _no_lane_can_continue(self) -> bool:
        idle = self._left + sum(task not in self._ended for task in self._waiting.values())
        if idle < self._lanes:
            return False
        self.stopping = True  # so that all lanes decide alike
        self._wake_all()
        return True

    def _wake_all(self) -> None:
        """Let every lane check again whether there is something to wait for."""
        for waiters in self._waiters.values():
            for waiter in waiters:
                waiter.set()
        self._waiters.clear()
        self._changed.notify_all()

    def unfinished(self, stage: str) -> list[Task]:
        """Return the tasks of a stage that could run and have not."""
        each, steps = (
            self._schedule[stage].each,
            sorted(step for step in self._micros if step < self.last),
        )
        tasks = [
            Task(stage, step, micro)
            for step in steps
            for micro in range(self._micros[step] if each else 1)
        ]
        return [
            task
            for task in tasks
            if task not in self._ended and all(need in self._ended for need in self.needs(task))
        ]

    def end(self, step: int) -> None:
        """Declare that steps from `step` on do not exist."""
        self._change(lambda: setattr(self, "last", min(self.last, step)))

    def stop(self, error: BaseException | None = None) -> None:
        """Let every lane leave after its running task; the first error is the one raised."""

        def change() -> None:
            if error is not None and self.error is None:
                self.error = error
            self.stopping = True

        self._change(change)

    def close(self) -> None:
        """Let every lane go as far as the caller's last step allows, then leave."""
        self._change(lambda: setattr(self, "closing", True))

    def leave(self) -> None:
        """Record that a lane has left."""
        self._change(lambda: setattr(self, "_left", self._left + 1))

    def all_left(self, seconds: float) -> bool:
        """Wait until all lanes have left; short waits, so that Ctrl-C takes effect."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while self._left < self._lanes and time.monotonic() < deadline:
                self._changed.wait(timeout=0.2)
            return self._left >= self._lanes

    def _change(self, change: Callable[[], None]) -> None:
        with self._changed:
            change()
            self._wake_all()
