"""Hazards: which earlier write each read must wait for, proved from a schedule's order alone.

Rows of step t live in the tables and, once retrieved, in the buffer of step t. An update of step u
< t reaches the rows of step t in one of two ways: it was written into the tables before t's
retrieval read them, or it is copied from u's buffer over t's, after u's update and before t's rows
are read. A key that skips a batch (used by t-2 and t, not by t-1) is only safe because write(t-2)
comes before retrieve(t). Everything here is pure: it looks at names and numbers, never at rows.
Touch this when a stage reads, copies or writes rows in a new place.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch

from slipstream.pipeline.schedule import PACE, Lane, Schedule, Stage


@dataclass(frozen=True)
class Task:
    """One stage of one step; `micro` is 0 where the stage does not run once per micro-batch."""

    stage: str
    step: int
    micro: int = 0


def copied_from(schedule: Schedule, step: int) -> range:
    """Return the steps whose buffers are copied over that of `step` before its rows are read."""
    return range(step - schedule.buffers_ahead, step - schedule.staleness)


def refreshed_from(schedule: Schedule, step: int) -> range:
    """Return the steps whose buffers are copied over that of `step` between reading and update."""
    return range(step - schedule.staleness, step)


def kept_until(schedule: Schedule, step: int) -> int:
    """Return the last step that may still copy from the buffer of `step`."""
    return step + max(schedule.buffers_ahead, schedule.staleness)


def needs(
    schedule: Schedule, task: Task, micros: Callable[[int], int], first: int = 0
) -> Iterator[Task]:
    """Yield the tasks that must have ended before this one may begin, of those that exist."""
    for after in schedule.after(schedule[task.stage]):
        step = task.step - after.back
        if step < first:
            continue
        if not schedule[after.stage].each:
            yield Task(after.stage, step)
        elif after.micro is None:
            yield from (Task(after.stage, step, each) for each in range(micros(step)))
        elif task.micro >= after.micro:
            yield Task(after.stage, step, task.micro - after.micro)


@dataclass(frozen=True)
class LaneThread:
    """A thread: stages of a lane, of every step or of each `of`-th."""

    lane: Lane
    stages: tuple[Stage, ...]
    turn: int = 0
    of: int = 1

    def order(self, first: int, last: int) -> Iterator[tuple[Stage, int]]:
        """Yield (stage, step) in the thread's order: round k takes each stage at step k + ahead."""
        for round_ in range(first - max(stage.ahead for stage in self.stages), last):
            for stage in self.stages:
                step = round_ + stage.ahead
                if first <= step < last and step % self.of == self.turn:
                    yield stage, step


def threads_of(schedule: Schedule) -> list[LaneThread]:
    """Return a schedule's threads: one a lane, and those of stages that have several."""
    found = []
    for lane in dict.fromkeys(stage.lane for stage in schedule.stages):
        stages = [stage for stage in schedule.stages if stage.lane == lane]
        if together := tuple(stage for stage in stages if stage.threads == 1):
            found.append(LaneThread(lane, together))
        for stage in stages:
            if stage.threads > 1:
                turns = range(stage.threads)
                found += [LaneThread(lane, (stage,), turn, stage.threads) for turn in turns]
    return found


def serial_order(stages: tuple[Stage, ...], step: int, micros: int) -> Iterator[Task]:
    """Yield a step's tasks one after the other; neighbouring `each` stages take turns."""
    place = 0
    while place < len(stages):
        group = [stages[place]]
        while (
            stages[place].each
            and place + len(group) < len(stages)
            and stages[place + len(group)].each
        ):
            group.append(stages[place + len(group)])
        for micro in range(micros if stages[place].each else 1):
            yield from (Task(stage.name, step, micro) for stage in group)
        place += len(group)


def programs(schedule: Schedule, steps: int, micros: int) -> list[list[Task]]:
    """Return every thread's tasks in its order."""
    if schedule.serial:
        return [
            [task for step in range(steps) for task in serial_order(schedule.stages, step, micros)]
        ]
    return [
        [
            Task(stage.name, step, micro)
            for stage, step in thread.order(0, steps)
            for micro in range(micros if stage.each else 1)
        ]
        for thread in threads_of(schedule)
    ]


def before(schedule: Schedule, steps: int, micros: int) -> dict[Task, frozenset[Task]]:
    """Return for each task all tasks that certainly end before it; stuck tasks are left out."""
    threads = [list(program) for program in programs(schedule, steps, micros)]
    known: dict[Task, frozenset[Task]] = {}
    previous: list[Task | None] = [None] * len(threads)
    progress = True
    while progress:
        progress = False
        for place, program in enumerate(threads):
            while program:
                task = program[0]
                direct = list(needs(schedule, task, lambda step: micros))
                if (earlier := previous[place]) is not None:
                    direct.append(earlier)
                if any(each not in known for each in direct):
                    break
                known[task] = frozenset(direct).union(*(known[each] for each in direct))
                previous[place] = program.pop(0)
                progress = True
    return known


@lru_cache(maxsize=64)
def problems(schedule: Schedule) -> tuple[str, ...]:
    """Return what a schedule's order fails to guarantee; empty if it keeps its promise."""
    steps, micros = 2 * schedule.buffers_ahead + schedule.staleness + 4, 2
    known = before(schedule, steps, micros)
    everything = [task for program in programs(schedule, steps, micros) for task in program]
    stuck = [task for task in everything if task not in known]
    if stuck:
        return (f"{stuck[0].stage} of step {stuck[0].step} waits for itself",)

    def ordered(first: Task, second: Task) -> bool:
        return first in known[second]

    return tuple(
        dict.fromkeys(
            sentence
            for step in range(steps)
            for sentence in _broken(schedule, step, micros, ordered)
        )
    )


def _broken(
    schedule: Schedule, step: int, micros: int, ordered: Callable[[Task, Task], bool]
) -> Iterator[str]:
    """Yield the promises about one step's rows that the order does not keep."""
    retrieve, updated = Task("retrieve", step), Task(schedule.row_update, step)
    yield from _unseen(schedule, step, ordered)
    for micro in range(micros):
        if not (
            ordered(retrieve, Task("answer", step, micro))
            and ordered(Task("answer", step, micro), updated)
        ):
            yield "rows are updated before all micro-batches have read them"
    if "refresh" in schedule and not ordered(
        Task("answer", step, micros - 1), Task("refresh", step)
    ):
        yield "rows are copied while they are being read"
    for earlier in range(step if not schedule.staleness else 0):
        held = earlier in copied_from(schedule, step)
        seen = Task(schedule.row_update if held else "write", earlier)
        if not ordered(seen, Task("compute", step)):
            yield f"rows read on demand may miss the update of {step - earlier} steps earlier"
    if not ordered(updated, Task("write", step)):
        yield "rows are written back before they are updated"
    if schedule.row_update != PACE and not ordered(Task(PACE, step), updated):
        yield "rows are updated before the step is certain"


def _unseen(schedule: Schedule, step: int, ordered: Callable[[Task, Task], bool]) -> Iterator[str]:
    """Yield updates of earlier steps that may miss this step's rows, or reach them too soon."""
    retrieve, copies, refreshes = (
        Task("retrieve", step),
        copied_from(schedule, step),
        refreshed_from(schedule, step),
    )
    for earlier in range(step):
        updated, written = Task(schedule.row_update, earlier), Task("write", earlier)
        back = step - earlier
        if earlier in copies:
            copy = Task("synchronise", step)
            if "synchronise" not in schedule or not (
                ordered(updated, copy) and ordered(copy, Task("answer", step))
            ):
                yield f"rows updated {back} steps earlier are not copied before they are read"
        elif earlier in refreshes:
            fresh = Task("refresh", step)
            if "refresh" not in schedule or not (
                ordered(updated, fresh) and ordered(fresh, Task(schedule.row_update, step))
            ):
                yield f"rows updated {back} steps earlier are not copied before the next update"
            if not ordered(retrieve, written):
                yield f"retrieval may or may not see the write-back of {back} steps earlier"
        elif not ordered(written, retrieve):
            yield f"retrieval does not wait for the write-back of {back} steps earlier"


@dataclass(frozen=True)
class Sources:
    """Where a step's rows come from: copied from earlier buffers, the rest from the tables."""

    copies: list[tuple[int, torch.Tensor, torch.Tensor]]  # (step, places there, places here)
    rest_R: torch.Tensor  # places here


def sources(keys_U: torch.Tensor, earlier: Mapping[int, torch.Tensor]) -> Sources:
    """Find each key's newest holder among earlier buffers; all key lists are unique, ascending."""
    rest_R = torch.arange(keys_U.numel())
    copies = []
    for step in sorted(earlier, reverse=True):
        there_R = torch.searchsorted(earlier[step], keys_U[rest_R])
        held_R = there_R < earlier[step].numel()
        held_R &= (
            earlier[step][there_R.clamp_(max=max(earlier[step].numel() - 1, 0))] == keys_U[rest_R]
            if held_R.any()
            else False
        )
        if held_R.any():
            copies.append((step, there_R[held_R], rest_R[held_R]))
            rest_R = rest_R[~held_R]
    return Sources(copies, rest_R)
