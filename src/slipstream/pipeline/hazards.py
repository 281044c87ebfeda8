"""Hazards: which earlier write each read must wait for, proved from a schedule's listed order
alone.

Rows of step t live in the tables and, once retrieved, in the buffer of step t. An update of step u
< t reaches the rows of step t in one of two ways: it was written into the tables before t's
retrieval read them, or it is copied from u's buffer over t's, after u's update and before t's rows
are lent. A key that skips a batch (used by t-2 and t, not by t-1) is only safe because write(t-2)
comes before retrieve(t). Everything here is pure: it looks at names and numbers, never at rows.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch

from slipstream.pipeline.schedule import PACE, Schedule, Stage


@dataclass(frozen=True)
class Task:
    """One stage of one step, of one micro-batch where the stage runs once for each (else micro is
    0).
    """

    stage: str
    step: int
    micro: int = 0


def copied_from(schedule: Schedule, step: int) -> range:
    """The steps whose buffers are copied over the one of `step` before its rows are lent."""
    return range(step - schedule.buffers_ahead, step - schedule.staleness)


def refreshed_from(schedule: Schedule, step: int) -> range:
    """The steps whose buffers are copied over the one of `step` after its rows were lent, so that
    it moves current rows.
    """
    return range(step - schedule.staleness, step)


def kept_until(schedule: Schedule, step: int) -> int:
    """The last step that may still copy from the buffer of `step`."""
    return step + max(schedule.buffers_ahead, schedule.staleness)


def needs(
    schedule: Schedule, task: Task, micros: Callable[[int], int], first: int = 0
) -> Iterator[Task]:
    """The tasks that must have ended before this one may begin; steps and micro-batches that do not
    exist are left out.
    """
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


def lane_order(stages: list[Stage], first: int, last: int) -> Iterator[tuple[Stage, int]]:
    """(stage, step) in the order one lane runs them: round k takes each stage at step k + ahead."""
    for round_ in range(first - max(stage.ahead for stage in stages), last):
        for stage in stages:
            if first <= round_ + stage.ahead < last:
                yield stage, round_ + stage.ahead


def serial_order(stages: tuple[Stage, ...], step: int, micros: int) -> Iterator[Task]:
    """A step's tasks one after the other: neighbouring stages that run once per micro-batch take
    turns.
    """
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


def _programs(schedule: Schedule, steps: int, micros: int) -> list[list[Task]]:
    """Every thread's tasks in its order."""
    if schedule.serial:
        return [
            [task for step in range(steps) for task in serial_order(schedule.stages, step, micros)]
        ]
    lanes = dict.fromkeys(stage.lane for stage in schedule.stages)
    return [
        [
            Task(stage.name, step, micro)
            for stage, step in lane_order(
                [each for each in schedule.stages if each.lane == lane], 0, steps
            )
            for micro in range(micros if stage.each else 1)
        ]
        for lane in lanes
    ]


def before(schedule: Schedule, steps: int, micros: int) -> dict[Task, frozenset[Task]]:
    """For every task all tasks that certainly ended before it begins; tasks that can never begin
    are left out.
    """
    programs = [list(program) for program in _programs(schedule, steps, micros)]
    known: dict[Task, frozenset[Task]] = {}
    previous: list[Task | None] = [None] * len(programs)
    moved = True
    while moved:
        moved = False
        for place, program in enumerate(programs):
            while program:
                task = program[0]
                direct = list(needs(schedule, task, lambda step: micros))
                if (earlier := previous[place]) is not None:
                    direct.append(earlier)
                if any(each not in known for each in direct):
                    break
                known[task] = frozenset(direct).union(*(known[each] for each in direct))
                previous[place] = program.pop(0)
                moved = True
    return known


@lru_cache(maxsize=64)
def problems(schedule: Schedule) -> tuple[str, ...]:
    """What a schedule's order fails to guarantee, in words; empty when it keeps its promise."""
    steps, micros = 2 * schedule.buffers_ahead + schedule.staleness + 4, 2
    known = before(schedule, steps, micros)
    everything = [task for program in _programs(schedule, steps, micros) for task in program]
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
    """The promises about one step's rows that the order does not keep."""
    retrieve, moved = Task("retrieve", step), Task(schedule.moves, step)
    yield from _unseen(schedule, step, ordered)
    for micro in range(micros):
        if not (
            ordered(retrieve, Task("answer", step, micro))
            and ordered(Task("answer", step, micro), moved)
        ):
            yield "rows are moved before all micro-batches have them"
    if "refresh" in schedule and not ordered(
        Task("answer", step, micros - 1), Task("refresh", step)
    ):
        yield "rows are copied while they are being lent"
    if not ordered(moved, Task("write", step)):
        yield "rows are written back before they are moved"
    if schedule.moves != PACE and not ordered(Task(PACE, step), moved):
        yield "rows are moved before the step is certain"


def _unseen(schedule: Schedule, step: int, ordered: Callable[[Task, Task], bool]) -> Iterator[str]:
    """Updates of earlier steps that may not reach this step's rows, or reach them sooner than
    declared.
    """
    retrieve, copies, refreshes = (
        Task("retrieve", step),
        copied_from(schedule, step),
        refreshed_from(schedule, step),
    )
    for earlier in range(step):
        moved, landed, back = Task(schedule.moves, earlier), Task("write", earlier), step - earlier
        if earlier in copies:
            copy = Task("synchronise", step)
            if "synchronise" not in schedule or not (
                ordered(moved, copy) and ordered(copy, Task("answer", step))
            ):
                yield f"rows moved {back} steps earlier are not copied before they are lent"
        elif earlier in refreshes:
            fresh = Task("refresh", step)
            if "refresh" not in schedule or not (
                ordered(moved, fresh) and ordered(fresh, Task(schedule.moves, step))
            ):
                yield f"rows moved {back} steps earlier are not copied before they are moved again"
            if not ordered(retrieve, landed):
                yield f"retrieval may or may not see the write-back of {back} steps earlier"
        elif not ordered(landed, retrieve):
            yield f"retrieval does not wait for the write-back of {back} steps earlier"


@dataclass(frozen=True)
class Sources:
    """Where the rows of a step's buffer come from: copied out of earlier buffers, the rest from the
    tables.
    """

    copies: list[tuple[int, torch.Tensor, torch.Tensor]]  # (step, places there, places here)
    rest_R: torch.Tensor  # places here


def sources(keys_U: torch.Tensor, earlier: Mapping[int, torch.Tensor]) -> Sources:
    """Each key's newest holder among the earlier buffers, whose key lists (like `keys_U`) are
    unique and ascending.
    """
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
