"""`train.schedule=auto`: tries the plain loop and exact schedules, and continues with the faster.

`AutoSteps` gives the loop its steps. It changes between the plain loop and a pipeline at the
beginning of a step, when no lane runs; batches that a pipeline has loaded ahead go back to the
loader. All ranks decide alike, from times they have averaged. Every change is in run.json before
its first step, and a resumed run follows what is written there: the cut of a step decides its
rounding. Touch this to measure something else; what is tried and chosen is `pipeline/adaptive.py`.
"""

import contextlib
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

from slipstream.data.balance import Cost
from slipstream.errors import SlipstreamError
from slipstream.pipeline import adaptive
from slipstream.pipeline.adaptive import Attempt, Choice, Probe, Trial
from slipstream.pipeline.refusals import refuse_unsafe_work
from slipstream.pipeline.schedule import Schedule, make_schedule
from slipstream.pipeline.trace import shares
from slipstream.pipeline.work import StepResult, Work
from slipstream.training.device import HOST
from slipstream.training.loop import PlainSteps, Steps
from slipstream.training.recommender import Recommender
from slipstream.training.step_cost import predicted_cost

if TYPE_CHECKING:
    from slipstream.training.recorder import Recorder
    from slipstream.training.scheduled import ScheduledSteps

PLAIN = "synchronous"
FEWEST_STEPS = 300  # shorter runs would lose more by trying than a schedule can win
FEWEST_TO_CUT = 1_000  # the same for schedules that cut batches, which can be several times slower
STALLED = 4.0  # times the median step: nothing that a schedule does
FIRST_CHECK = 64  # steps from a choice to the first look whether it still fits; then twice as many
Measured = tuple[float, float, float]  # a step: seconds, predicted FLOPs, seconds of lookups


@dataclass(frozen=True)
class Phase:
    """From step `step` on: a schedule and its numbers, chosen or only tried."""

    step: int
    schedule: str
    micro_batches: int = 1
    buffers: int = 0
    chosen: bool = False

    @classmethod
    def begin(cls, step: int, schedule: Schedule | None, *, chosen: bool) -> "Phase":
        if schedule is None:
            return cls(step, PLAIN, chosen=chosen)
        numbers = schedule.micro_batches, schedule.buffers_ahead
        return cls(step, schedule.name, *numbers, chosen)

    def describe(self) -> str:
        schedule = self.make()
        return "the plain loop" if schedule is None else adaptive.describe(schedule)

    def make(self) -> Schedule | None:
        """Return the schedule; None is the plain loop."""
        if self.schedule == PLAIN:
            return None
        return make_schedule(
            self.schedule, micro_batches=self.micro_batches, buffers_ahead=self.buffers or None
        )


def plain_reason(recorder: "Recorder", candidates: list[Schedule], total_steps: int) -> str | None:
    """Return why only the plain loop makes sense, or None.

    The reason is empty on one rank with its tables in memory, where nobody asks. Forgets what an
    earlier session chose under other conditions.
    """
    recommender, ranks = recorder.recommender, recorder.ranks
    tables, device = recommender.recipe.tables, recommender.device_transfer.device
    where = f"{ranks.replicas}x{ranks.shards} {tables.tier} {device} {torch.get_num_threads()}"
    if recorder.schedule.get("where") != where:
        recorder.schedule = {"where": where}
    tiers = {tables.tier, *(each.tier for each in tables.by_name.values())}
    in_files = tables.directory is not None and bool(tiers & {"disk", "hashed"})
    if ranks.world == 1 and not in_files and device == HOST:
        return ""
    if tables.replicas == "averaged" and ranks.replicas > 1:
        return "tables.replicas=averaged updates rows between steps too"
    if "adamw" in tables.optimizers():
        way_out = "use tables.optimizer=rowwise_adam to overlap lookups"
        return f"tables.optimizer=adamw updates rows that no batch touched; {way_out}"
    if recommender.recipe.train.accumulate > 1:
        return "train.accumulate keeps a step in parts; name a schedule to overlap them"
    if not candidates:
        return "the loss mixes samples and a table forgets rows, which no schedule allows together"
    left = total_steps - recorder.progress.step
    if left < FEWEST_STEPS and "phases" not in recorder.schedule:
        return f"{left} steps are too few to try another schedule"
    return None


def possible_schedules(recommender: Recommender, work: Work) -> list[Schedule]:
    """Return the exact schedules worth trying: one that keeps batches whole, one that cuts them."""
    parts = recommender.recipe.train.micro_batches
    micro_batches = 8 if parts == "auto" else parts
    tables = recommender.tables.tables
    forgets = any(table.forgets for table in tables.values())
    cut = make_schedule("frozen_window" if forgets else "nested", micro_batches=micro_batches)
    found = []
    for schedule in (make_schedule("dual_buffer"), *([cut] if cut.cuts_batches else [])):
        with contextlib.suppress(SlipstreamError):
            refuse_unsafe_work(schedule, work, tables)
            found.append(schedule)
    return found


class AutoSteps:
    """Steps of the plain loop or of a schedule, whichever is faster at the time.

    `open_pipeline(schedule, step)` starts a schedule at a step.
    """

    def __init__(
        self,
        recorder: "Recorder",
        stop: threading.Event,
        candidates: list[Schedule],
        open_pipeline: Callable[[Schedule, int], "ScheduledSteps"],
        total_steps: int,
    ) -> None:
        self._recorder, self._ranks = recorder, recorder.ranks
        self._candidates, self._open, self._total = candidates, open_pipeline, total_steps
        recommender = recorder.recommender
        self._cost: Cost = predicted_cost(recommender.recipe, recommender.features.num_items)
        self._plain = PlainSteps(
            recommender, recorder.optimizer, recorder.loader, recorder.ranks, stop
        )
        self._pipelined: ScheduledSteps | None = None
        self._phases = [Phase(**phase) for phase in recorder.schedule.get("phases", ())]
        self._recorded = deque(self._phases)
        self._search: Generator[Attempt, Trial, Choice] | None = None
        self._attempt = Attempt(None, 0)  # the running try
        self._baseline: Trial | None = None
        self._check_at, self._interval = FIRST_CHECK, FIRST_CHECK
        self._since: float | None = None  # the end of the step before, if nothing came between
        self._steps_in_phase = 0
        self._measured: deque[Measured] = deque(maxlen=FIRST_CHECK)  # the newest steps

    def next(self, step: int) -> StepResult | None:
        self._change_if_due(step)
        result = self._current.next(step)
        now = time.perf_counter()
        if result is not None:
            self._steps_in_phase += 1
            if self._since is not None and self._steps_in_phase > adaptive.WARM_UP:
                lengths = result.batch.lengths_B.numpy()
                work = float(self._cost(lengths).sum())
                self._measured.append((now - self._since, work, result.lookup_seconds))
        self._since = now
        return result

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        self._since = None  # what happens now is no part of a step
        with self._current.settled():
            yield

    def figures(self) -> dict[str, float]:
        return self._current.figures()

    def close(self) -> "ScheduledSteps | None":
        """End a running pipeline; return it, for its trace."""
        last = self._pipelined
        self._switch(None, 0)
        return last

    @property
    def _current(self) -> Steps:
        return self._plain if self._pipelined is None else self._pipelined

    def _change_if_due(self, step: int) -> None:
        """Begin another phase where a recorded one, a try or a check of the choice is due."""
        if self._recorded and self._replay(step):
            return
        if self._search is None:
            if not self._search_is_due(step):
                return
            self._search, trial = adaptive.search(self._worth_trying(step)), None
        elif len(self._measured) < self._attempt.steps and not self._hopeless():
            return
        else:
            trial = self._trial()
        try:
            attempt = next(self._search) if trial is None else self._search.send(trial)
        except StopIteration as ended:
            self._search, self._baseline = None, None
            choice: Choice = ended.value
            self._recorder.line.print(choice.why)
            self._begin(Phase.begin(step, choice.schedule, chosen=True))
            return
        self._attempt = attempt
        self._begin(Phase.begin(step, attempt.schedule, chosen=False))

    def _hopeless(self) -> bool:
        """Whether the first measured step of a try was so slow that it is over. Collective."""
        if len(self._measured) != 1 or math.isinf(self._attempt.give_up):
            return False
        return self._trial().seconds > self._attempt.give_up

    def _replay(self, step: int) -> bool:
        """Follow an earlier session; False where it was interrupted before it had chosen."""
        due = None
        while self._recorded and self._recorded[0].step <= step:
            due = self._recorded.popleft()
        if due is not None and (self._recorded or due.chosen):
            self._switch(due.make(), step)
            if not self._recorded:
                self._recorder.line.print(f"schedule: {due.describe()}, as chosen before")
        return due is None or due.chosen or bool(self._recorded)

    def _search_is_due(self, step: int) -> bool:
        """Whether to search: at the start, or when a check finds that the steps have changed."""
        if self._total - step < FEWEST_STEPS:
            return False
        if not self._phases or not self._phases[-1].chosen:
            return True
        if self._steps_in_phase < self._check_at or len(self._measured) < FIRST_CHECK // 2:
            return False
        self._interval *= 2
        self._check_at = self._steps_in_phase + self._interval
        now = self._trial()
        if self._baseline is None:
            self._baseline = now
            return False
        return now.drifted(self._baseline, self._pipelined is None)

    def _worth_trying(self, step: int) -> list[Schedule]:
        """Return the candidates whose tries a run of this length can afford; one at least."""
        if self._total - step >= FEWEST_TO_CUT:
            return self._candidates
        whole = [schedule for schedule in self._candidates if not schedule.cuts_batches]
        return whole or self._candidates

    def _begin(self, phase: Phase) -> None:
        """Record a phase, then change to it."""
        self._phases.append(phase)
        self._recorder.schedule["phases"] = [asdict(each) for each in self._phases]
        self._recorder.write_run()
        schedule = phase.make()
        if schedule is None and self._pipelined is None:
            return self._forget()
        self._switch(schedule, phase.step)

    def _switch(self, schedule: Schedule | None, step: int) -> None:
        """End the running pipeline, if any, and start another, if any."""
        if self._pipelined is not None:
            self._recorder.loader.put_back(self._pipelined.pipeline.finish())
            self._pipelined = None
        if schedule is not None:
            self._pipelined = self._open(schedule, step)
        self._forget()

    def _forget(self) -> None:
        """Measure from here on."""
        self._since, self._steps_in_phase, self._check_at = None, 0, self._interval
        self._measured.clear()

    def _trial(self) -> Trial:
        """Return what the measured steps took, averaged over ranks. Collective."""
        kept = _without_stalls(self._measured)
        seconds, work, lookups = (sum(values) for values in zip(*kept, strict=True))
        if self._pipelined is None:
            means = self._mean([seconds, work, lookups])
            return Trial(means[0] / max(means[1], 1.0), means[2] / means[0])
        pipeline = self._pipelined.pipeline
        first = max(self._steps_in_phase - len(self._measured), adaptive.WARM_UP)
        intervals = pipeline.trace.intervals(first - 1)
        found = shares(intervals, first - 1, self._steps_in_phase - 1)
        waits = found.get("exposed_lookup", 0.0) + found.get("exposed_comm", 0.0)
        probe = adaptive.probe(intervals, pipeline.schedule.micro_batches)
        means = self._mean([seconds, work, waits, *probe.values()])
        return Trial(
            means[0] / max(means[1], 1.0), means[2], Probe(probe.micro_batches, *means[3:])
        )

    def _mean(self, values: list[float]) -> list[float]:
        return [value / self._ranks.world for value in self._ranks.sum(values)]


def _without_stalls(steps: Sequence[Measured]) -> list[Measured]:
    """Leave out steps far slower than the others: the machine stood still, not the schedule."""
    typical = statistics.median(seconds / max(work, 1.0) for seconds, work, _ in steps)
    return [each for each in steps if each[0] / max(each[1], 1.0) <= STALLED * typical]
