"""Runs that take turns: each is a process that trains for a while and then waits for its next turn.

Whatever slows the machine for a minute slows all of them alike. A run reports when it has begun to
wait; the driver lets the next one go on. Touch this when runs are interleaved in another way.
"""

import os
import select
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from slipstream.training.callbacks import Callback, TrainingSession

GO, WAITING = "go", "waiting"  # pipes with names, in the scratch folder of a run


class TakesTurns(Callback):
    """Stops a run after every `steps` steps until it is told to go on; counts the time between."""

    def __init__(self, scratch: Path, steps: int) -> None:
        self._scratch, self._steps = scratch, steps
        self._go, self._waiting = -1, -1
        self._since = 0.0
        self.seconds = 0.0  # spent in turns
        self.blocks: list[float] = []  # of each turn

    def on_start(self, session: TrainingSession) -> None:
        self._waiting = os.open(self._scratch / WAITING, os.O_WRONLY)
        self._go = os.open(self._scratch / GO, os.O_RDONLY)
        self._wait()

    def on_log(self, session: TrainingSession, figures: dict[str, Any]) -> None:
        if session.step % self._steps == 0 and session.step < session.total_steps:
            self.end_turn()
            self._wait()

    def end_turn(self) -> None:
        """Count the time of a turn."""
        self.blocks.append(time.perf_counter() - self._since)
        self.seconds += self.blocks[-1]

    def _wait(self) -> None:
        os.write(self._waiting, b".")
        os.read(self._go, 1)
        self._since = time.perf_counter()


class _Run:
    """The driver's end of a run."""

    def __init__(self, scratch: Path) -> None:
        for name in (GO, WAITING):
            os.mkfifo(scratch / name)
        # Opened for reading and writing: neither waits for the other end, nor sees it close.
        self._go, self._waiting = (os.open(scratch / name, os.O_RDWR) for name in (GO, WAITING))

    def go_on(self) -> None:
        os.write(self._go, b".")

    def is_waiting(self, seconds: float) -> bool:
        """Return whether the run has begun to wait, within some seconds."""
        ready, _, _ = select.select([self._waiting], [], [], seconds)
        return bool(ready) and os.read(self._waiting, 1) == b"."

    def close(self) -> None:
        for end in (self._go, self._waiting):
            os.close(end)


def take_turns(
    runs: Mapping[str, tuple[Path, Callable[[], Any]]], seconds_allowed: float
) -> dict[str, Any]:
    """Run all of them, one at a time, and return their results by name.

    Each run is the scratch folder of its `TakesTurns` and a function that starts its process and
    returns its result.
    """
    deadline = time.monotonic() + seconds_allowed
    with ThreadPoolExecutor(len(runs)) as pool:
        ends = {name: _Run(scratch) for name, (scratch, _) in runs.items()}
        begun: dict[str, Future[Any]] = {}
        try:
            for name, (_, start) in runs.items():
                begun[name] = pool.submit(start)
                _until_it_waits(ends[name], begun[name], deadline)
            going: Sequence[str] = list(runs)
            while going:
                for name in going:
                    ends[name].go_on()
                    _until_it_waits(ends[name], begun[name], deadline)
                going = [name for name in going if not begun[name].done()]
            return {name: future.result() for name, future in begun.items()}
        finally:
            for name, future in begun.items():  # a run that failed must not leave others waiting
                while not future.done():
                    ends[name].go_on()
                    ends[name].is_waiting(0.05)
            for end in ends.values():
                end.close()


def _until_it_waits(end: _Run, run: "Future[Any]", deadline: float) -> None:
    while not run.done() and not end.is_waiting(0.02):
        if time.monotonic() > deadline:
            raise TimeoutError("a run did not end its turn in time")
    if run.done():
        run.result()  # raises what ended it
