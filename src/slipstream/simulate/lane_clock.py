"""A clock for many workers: when every task of a schedule begins and ends on each of them.

The tasks, the order of every lane and what a task waits for come from the pipeline itself
(`pipeline/hazards.py`). Times are vectors over workers, so a step of 1,536 workers costs as many
vector operations as it has tasks. Exchanges use a worker's network one after the other, in one
fixed order: that in which they would begin if compute took much longer than all else, which is what
pipelines are built for. Orders never depend on times, so nothing that gets faster makes a step
slower. Touch this when a task of a schedule takes another kind of resource.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

import numpy as np

from slipstream.pipeline import hazards
from slipstream.pipeline.hazards import Task
from slipstream.pipeline.schedule import PACE, Lane, Schedule
from slipstream.pipeline.trace import Interval

Among = Literal["group", "replicas", "everybody"]
_NOMINAL = {"compute": 64}  # how long a task takes where the order is made; all others take 1
Seconds = float | np.ndarray  # one for all workers, or one each


@dataclass(frozen=True)
class ExchangeTime:
    """An exchange among the shards of a group, the replicas of a shard, or everybody.

    It begins when the last of them is there and takes the longest of their `network` seconds, in
    which they exchange nothing else, and then `latency` seconds in which they may.
    """

    among: Among
    network: Seconds = 0.0
    latency: float = 0.0


@dataclass(frozen=True)
class TaskTime:
    """What a task takes: seconds of its lane, then exchanges one after the other."""

    seconds: Seconds = 0.0
    exchanges: tuple[ExchangeTime, ...] = ()


@dataclass(frozen=True)
class PlannedTask:
    """A task with the thread that runs it, what it waits for, and whether the caller runs it."""

    task: Task
    thread: int
    needs: tuple[Task, ...]
    lane: Lane
    by_caller: bool


@dataclass
class LaneTimes:
    """When steps ended (the last worker's update), and what the watched workers' lanes did."""

    ends_S: np.ndarray
    intervals: list[list[Interval]] = field(default_factory=list)


@lru_cache(maxsize=64)
def task_order(schedule: Schedule, steps: int) -> tuple[PlannedTask, ...]:
    """Return all tasks in the order in which they begin if compute takes most of the time.

    It keeps the order of every lane, and every task comes after those it needs. A lane has one
    thread here: lookups take the time of a resource that they share.
    """
    stages = tuple(replace(stage, threads=1) for stage in schedule.stages)
    schedule = replace(schedule, stages=stages)
    programs = hazards.programs(schedule, steps, schedule.micro_batches)
    at, ends, found = [0] * len(programs), dict[Task, int](), list[tuple[int, PlannedTask]]()
    threads_end = [0] * len(programs)
    progress = True
    while progress:
        progress = False
        for thread, program in enumerate(programs):
            while at[thread] < len(program):
                task = program[at[thread]]
                needs = tuple(hazards.needs(schedule, task, lambda step: schedule.micro_batches))
                if any(need not in ends for need in needs):
                    break
                begin = max((ends[need] for need in needs), default=0)
                begin = max(begin, threads_end[thread])
                ends[task] = threads_end[thread] = begin + _NOMINAL.get(task.stage, 1)
                lane = schedule[task.stage].lane
                caller = schedule.serial or lane == Lane.COMPUTE
                found.append((begin, PlannedTask(task, thread, needs, lane, caller)))
                at[thread] += 1
                progress = True
    places = {stage.name: place for place, stage in enumerate(schedule.stages)}

    def key(planned: tuple[int, PlannedTask]) -> tuple[int, int, int, int]:
        begin, task = planned[0], planned[1].task
        return begin, task.step, places[task.stage], task.micro

    return tuple(planned for _, planned in sorted(found, key=key))


class LaneClock:
    """Runs a schedule's tasks over shards x replicas workers; `watched` workers are recorded."""

    def __init__(
        self, schedule: Schedule, shards: int, replicas: int = 1, watched: Sequence[int] = (0,)
    ) -> None:
        if broken := hazards.problems(schedule):
            raise ValueError(f"schedule '{schedule.name}' breaks its promise: {broken[0]}")
        self.schedule, self.shards, self.replicas = schedule, shards, replicas
        self.workers = shards * replicas
        self.watched = np.array(watched, dtype=np.int64)

    def run(self, steps: int, time_of: Callable[[Task], TaskTime]) -> LaneTimes:
        """Run so many steps; `time_of` tells what each task takes."""
        order = task_order(self.schedule, steps)
        free = np.zeros((1 + max(planned.thread for planned in order), self.workers))
        network_W = np.zeros(self.workers)
        ends: dict[Task, np.ndarray] = {}
        times = LaneTimes(np.zeros(steps), [[] for _ in self.watched])
        last_use = _last_uses(order)
        for place, planned in enumerate(order):
            task, lane_free_W = planned.task, free[planned.thread]
            begin_W = lane_free_W.copy()
            for need in planned.needs:
                np.maximum(begin_W, ends[need], out=begin_W)
            end_W = self._end(begin_W, time_of(task), network_W)
            self._record(times, planned, lane_free_W, begin_W, end_W, ends)
            ends[task] = end_W
            free[planned.thread] = end_W
            if task.stage == PACE:
                times.ends_S[task.step] = end_W.max()
            for old in last_use.get(place, ()):
                ends.pop(old, None)
        return times

    def _end(self, begin_W: np.ndarray, time: TaskTime, network_W: np.ndarray) -> np.ndarray:
        """Return when a task ends; exchanges move the moment from which the network is free."""
        now_W = begin_W + time.seconds
        for exchange in time.exchanges:
            start_W = np.maximum(now_W, network_W) if np.any(exchange.network) else now_W
            taken_W = np.broadcast_to(np.asarray(exchange.network, dtype=float), start_W.shape)
            sent_W = self._latest(start_W, exchange.among) + self._latest(taken_W, exchange.among)
            if np.any(exchange.network):
                network_W[:] = sent_W
            now_W = sent_W + exchange.latency
        return now_W

    def _latest(self, times_W: np.ndarray, among: Among) -> np.ndarray:
        """Return for each worker the largest value among those it exchanges with."""
        if among == "everybody":
            return np.full(self.workers, times_W.max())
        times_RS = times_W.reshape(self.replicas, self.shards)
        latest_RS = times_RS.max(axis=1 if among == "group" else 0, keepdims=True)
        return np.broadcast_to(latest_RS, times_RS.shape).reshape(-1)

    def _record(
        self,
        times: LaneTimes,
        planned: PlannedTask,
        ready_W: np.ndarray,
        begin_W: np.ndarray,
        end_W: np.ndarray,
        ends: dict[Task, np.ndarray],
    ) -> None:
        """Add the task to the intervals of the watched workers, with the cause of its wait."""
        task = planned.task
        for found, worker in zip(times.intervals, self.watched.tolist(), strict=True):
            ready, begin, end = ready_W[worker], begin_W[worker], end_W[worker]
            cause = None
            if begin > ready:
                last = max(planned.needs, key=lambda need: ends[need][worker])
                cause = (last.stage, last.step, last.micro)
            place = (planned.lane, task.stage, task.step, task.micro)
            found.append(
                Interval(*place, float(ready), float(begin), float(end), planned.by_caller, cause)
            )


def _last_uses(order: Sequence[PlannedTask]) -> dict[int, list[Task]]:
    """Return which tasks are waited for the last time at each place of the order."""
    last = {planned.task: place for place, planned in enumerate(order)}
    for place, planned in enumerate(order):
        last |= dict.fromkeys(planned.needs, place)
    found: dict[int, list[Task]] = {}
    for task, place in last.items():
        found.setdefault(place, []).append(task)
    return found
