"""A clock for a few ranks that share cores and network cards, as the ranks of one machine do.

`LaneClock` gives every lane a resource of its own. Here the lanes of a rank, and ranks on the same
core, share that core evenly. The messages of a rank leave its card one after the other, in the
order in which they were sent (`queue`), or share it evenly; a card that was idle sends the first
`burst` bytes at once, as a token bucket does. A task runs through its parts in turn:
processor time; for each round of messages a word that it is ready (which waits in the queue like
any other message), a meeting with the other ranks, bytes over the card and the time until its
threads run again, which is longer on a busy core; a wait that uses nothing. Time goes from event to
event. Touch this when ranks share another resource.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slipstream.pipeline import hazards
from slipstream.pipeline.hazards import Task
from slipstream.pipeline.schedule import PACE, Schedule

_DONE = 1e-12  # what counts as nothing left, in seconds or bytes


@dataclass(frozen=True)
class RankTask:
    """What a task takes on one rank.

    Half of the processor time comes before the messages, half after them. In every round a rank
    waits for the others, sends its share of the bytes, and waits until all have sent theirs.
    """

    cpu: float = 0.0  # seconds of a core
    sent: float = 0.0  # bytes through the rank's card
    waits: float = 0.0  # seconds without any resource: a paced disk, the latency of messages
    rounds: int = 0  # of messages


@dataclass
class _Running:
    """A task under way: which part it is at, and what is left of it."""

    rank: int
    thread: int
    task: Task
    costs: RankTask
    part: int = -1
    left: float = 0.0
    kind: str = ""  # cpu, ready, meet, card, wake or wait

    def parts(self, rate: float | None) -> list[tuple[str, float]]:
        """Return what the task does in turn, and how many seconds of it."""
        costs, rounds = self.costs, self.costs.rounds
        if not rounds:
            return [("cpu", costs.cpu), ("wait", costs.waits)]
        sent = costs.sent / rounds / rate if rate else 0.0
        turns = [
            ("ready", float(sent > 0)),
            ("meet", 1.0),
            ("card", sent),
            ("meet", float(sent > 0)),
            ("wake", 1.0),
        ] * rounds
        return [("cpu", costs.cpu / 2), *turns, ("wait", costs.waits), ("cpu", costs.cpu / 2)]


class SharedClock:
    """Runs a schedule on as many ranks as `core_of` names cores; None: a network without limit."""

    def __init__(
        self,
        schedule: Schedule,
        core_of: Sequence[int],
        bytes_per_second: float | None = None,
        *,
        queue: bool = True,
        burst: float = 0.0,
        words: bool = True,
        wake_idle: float = 0.0,
        wake_busy: float = 0.0,
    ) -> None:
        """`wake_…` are the seconds until a thread that waits for a message runs again."""
        self.schedule, self.core_of = schedule, list(core_of)
        self.wake_idle, self.wake_busy = wake_idle, wake_busy
        self.rate, self.queue, self.words = bytes_per_second, queue, queue and words
        self.credit = burst / bytes_per_second if bytes_per_second else 0.0
        self.ranks = len(self.core_of)

    def run(self, steps: int, costs: Callable[[int, Task], RankTask]) -> list[float]:
        """Run so many steps and return when each ended on the last rank."""
        return _Run(self, steps, costs).run()


class _Run:
    """One run of the clock."""

    def __init__(
        self, clock: SharedClock, steps: int, costs: Callable[[int, Task], RankTask]
    ) -> None:
        self.clock, self.steps, self.costs = clock, steps, costs
        schedule = clock.schedule
        self.programs = hazards.programs(schedule, steps, schedule.micro_batches)
        self.at = [[0] * len(self.programs) for _ in range(clock.ranks)]
        self.idle = [[True] * len(self.programs) for _ in range(clock.ranks)]
        self.ended: list[set[Task]] = [set() for _ in range(clock.ranks)]
        self.met: dict[tuple[Task, int], list[_Running]] = defaultdict(list)
        self.active: list[_Running] = []
        self.waiting: list[tuple[float, int, _Running]] = []
        self.card_free = [-clock.credit] * clock.ranks
        self.now, self._order = 0.0, 0
        self.ends = [0.0] * steps

    def run(self) -> list[float]:
        for rank in range(self.clock.ranks):
            self._start_lanes(rank)
        while self.active or self.waiting:
            self._advance()
        return self.ends

    def _start_lanes(self, rank: int) -> None:
        """Begin the next task of every idle lane of a rank that has what it needs."""
        schedule, micros = self.clock.schedule, self.clock.schedule.micro_batches
        for thread, program in enumerate(self.programs):
            place = self.at[rank][thread]
            if not self.idle[rank][thread] or place == len(program):
                continue
            task = program[place]
            needs = hazards.needs(schedule, task, lambda step: micros)
            if all(need in self.ended[rank] for need in needs):
                self.idle[rank][thread] = False
                self._next_part(_Running(rank, thread, task, self.costs(rank, task)))

    def _next_part(self, running: _Running) -> None:
        """Go on to the next part of a task that takes any time, or end it."""
        parts = running.parts(self.clock.rate)
        while running.part + 1 < len(parts):
            running.part += 1
            running.kind, running.left = parts[running.part]
            if running.left <= _DONE:
                continue
            if running.kind == "meet":
                self._meet(running)
            elif running.kind == "wait":
                self._wait(running, self.now + running.left)
            elif running.kind == "ready":
                if not self.clock.words or self.card_free[running.rank] <= self.now:
                    continue
                self._wait(running, self.card_free[running.rank])
            elif running.kind == "wake":
                core = self.clock.core_of[running.rank]
                busy = any(
                    each.kind == "cpu" and self.clock.core_of[each.rank] == core
                    for each in self.active
                )
                seconds = self.clock.wake_busy if busy else self.clock.wake_idle
                if seconds <= _DONE:
                    continue
                self._wait(running, self.now + seconds)
            elif running.kind == "card" and self.clock.queue:
                last = max(self.now - self.clock.credit, self.card_free[running.rank])
                self.card_free[running.rank] = last + running.left
                self._wait(running, max(self.now, last + running.left))
            else:
                self.active.append(running)
            return
        self._end(running)

    def _wait(self, running: _Running, until: float) -> None:
        self._order += 1
        heapq.heappush(self.waiting, (until, self._order, running))

    def _meet(self, running: _Running) -> None:
        """Wait for the same part of the same task on all ranks."""
        present = self.met[running.task, running.part]
        present.append(running)
        if len(present) == self.clock.ranks:
            del self.met[running.task, running.part]
            for each in present:
                self._next_part(each)

    def _end(self, running: _Running) -> None:
        rank, thread, task = running.rank, running.thread, running.task
        self.ended[rank].add(task)
        self.at[rank][thread] += 1
        self.idle[rank][thread] = True
        if task.stage == PACE:
            self.ends[task.step] = max(self.ends[task.step], self.now)
        self._start_lanes(rank)

    def _advance(self) -> None:
        """Go to the next event: a part that ends, or a wait that is over."""
        users: dict[tuple[str, int], int] = defaultdict(int)
        for each in self.active:
            users[self._resource(each)] += 1
        soonest = min(
            (each.left * users[self._resource(each)] for each in self.active),
            default=float("inf"),
        )
        if self.waiting:
            soonest = min(soonest, self.waiting[0][0] - self.now)
        for each in self.active:
            each.left -= soonest / users[self._resource(each)]
        self.now += soonest
        finished = [each for each in self.active if each.left <= _DONE]
        self.active = [each for each in self.active if each.left > _DONE]
        while self.waiting and self.waiting[0][0] <= self.now + _DONE:
            finished.append(heapq.heappop(self.waiting)[2])
        for each in finished:
            self._next_part(each)

    def _resource(self, running: _Running) -> tuple[str, int]:
        if running.kind == "cpu":
            return "cpu", self.clock.core_of[running.rank]
        return "card", running.rank
