"""Chooses a schedule, its micro-batches and its buffers from the times of a run's steps.

`search` tries the plain loop and schedules in turn and returns the faster one; it only decides, so
it knows nothing of pipelines, ranks or clocks. `choose` sets the numbers of one schedule. A step is
probed whole and cut. Cutting costs compute (smaller kernels) and exchange (keys that
travel again), and leaves only the first rows and the last gradients exposed: 1/N of the exchange.
Both costs are taken as linear in N between the two probes. Where the cut step is no faster as
measured, nothing is cut: there was nothing to hide. More buffers than one are filled ahead where
retrieval fits into a step on average, but not always. Touch this to choose by another rule.
"""

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

from slipstream.pipeline.schedule import Schedule, make_schedule
from slipstream.pipeline.trace import Interval

WARM_UP, PROBED = 2, 4  # steps before, and steps of, each probe
PROBES = 2 * (WARM_UP + PROBED)  # steps before a choice is made
CANDIDATES = (1, 2, 4, 8, 16, 32)
_WORTH_IT = 0.98  # a cut must make a step this much shorter, as measured
SHORT, LONG = 4, 24  # steps measured of a first try, and of the last comparison
WORTH_TRYING = 0.05  # share of lookups and exchange from which a schedule is tried
_CLOSE = 1.02  # a schedule this much slower in a short try may still win the long comparison
_CLEAR = 0.8  # a schedule this much faster in a short try needs no long comparison
_HOPELESS = 1.5  # a try whose first measured step is this much slower ends there


@dataclass(frozen=True)
class Probe:
    """Seconds of a step at one number of micro-batches: means, and the longest retrieval."""

    micro_batches: int
    step: float
    compute: float  # forward, backward and update
    exchange: float  # rows and row gradients
    reduce: float
    table: float  # retrieval and write-back: the table lane
    longest_table: float

    def values(self) -> list[float]:
        """Return the times in the order of the fields, to average them over ranks."""
        return [self.step, self.compute, self.exchange, self.reduce, self.table, self.longest_table]


def probe(intervals: list[Interval], micro_batches: int) -> Probe:
    """Measure the steps of these intervals, without the first ones."""
    ends = {
        each.step: each.end for each in intervals if each.stage == "update" and each.step >= WARM_UP
    }
    steps = sorted(ends)
    taken = {step: dict.fromkeys(("compute", "exchange", "reduce", "table"), 0.0) for step in steps}
    groups = {
        "compute": "compute",
        "update": "compute",
        "answer": "exchange",
        "collect": "exchange",
        "reduce": "reduce",
    }
    groups |= {"retrieve": "table", "write": "table"}
    for each in intervals:
        if each.step in taken and each.stage in groups:
            taken[each.step][groups[each.stage]] += each.end - each.begin
    mean = {
        group: sum(one[group] for one in taken.values()) / max(len(steps), 1)
        for group in ("compute", "exchange", "reduce", "table")
    }
    if len(steps) == 1:  # a try that was given up: from the end of the step before
        before = (each.end for each in intervals if each.stage == "update")
        ends[steps[0] - 1] = min(before)
    seconds = max(ends.values(), default=0.0) - min(ends.values(), default=0.0)
    longest = max((one["table"] for one in taken.values()), default=0.0)
    return Probe(
        micro_batches,
        seconds / max(len(ends) - 1, 1),
        mean["compute"],
        mean["exchange"],
        mean["reduce"],
        mean["table"],
        longest,
    )


def predicted(whole: Probe, cut: Probe, micro_batches: int) -> float:
    """Predict the seconds of a step cut into so many parts, by the line through both probes."""
    share = (micro_batches - whole.micro_batches) / (cut.micro_batches - whole.micro_batches)
    compute = whole.compute + share * (cut.compute - whole.compute)
    exchange = whole.exchange + share * (cut.exchange - whole.exchange)
    exposed = max(exchange / micro_batches, exchange - compute)
    return max(compute + max(exposed, 0.0) + whole.reduce, whole.table)


def choose(schedule: Schedule, whole: Probe, cut: Probe) -> tuple[Schedule, str]:
    """Return the schedule to continue with, and a sentence that gives the reason."""
    if cut.step >= _WORTH_IT * whole.step:
        micro_batches = 1
        why = (
            f"cut into {cut.micro_batches} parts a step took {_ms(cut.step)} instead of "
            f"{_ms(whole.step)}: nothing to hide"
        )
    else:
        micro_batches = min(CANDIDATES, key=lambda number: (predicted(whole, cut, number), number))
        why = (
            f"a step computes {_ms(whole.compute)} and exchanges {_ms(whole.exchange)}; of that "
            f"{micro_batches} parts leave about "
            f"1/{micro_batches} exposed ({_ms(predicted(whole, cut, micro_batches))} a step "
            "expected)"
        )
    # At least as many as the schedule has: a recipe may name more.
    buffers = max(_buffers(whole, predicted(whole, cut, micro_batches)), schedule.buffers_ahead)
    why += f"; looking up takes {_ms(whole.table)}, at most {_ms(whole.longest_table)}"
    sentence = (
        f"schedule {schedule.name}: {micro_batches} micro-batches, {buffers} "
        f"buffer{'s' * (buffers > 1)} ahead, because {why}"
    )
    ahead = buffers if schedule.buffers_ahead else None
    return make_schedule(schedule.name, micro_batches=micro_batches, buffers_ahead=ahead), sentence


def _buffers(whole: Probe, expected: float) -> int:
    """Return the buffers to fill ahead: two where only the longest retrievals exceed a step."""
    return 2 if whole.table < expected < whole.longest_table else 1


@dataclass(frozen=True)
class Trial:
    """What steps took: seconds for a unit of work, and the share of lookups and exchange in them.

    For the plain loop `waits` is what could be hidden, for a schedule what it leaves exposed.
    """

    seconds: float
    waits: float
    probe: Probe | None = None  # of a schedule

    def drifted(self, since: "Trial", plain: bool) -> bool:
        """Whether another choice may be right by now: the steps are not those it was made for."""
        if plain:
            return self.waits > max(since.waits + 0.05, WORTH_TRYING)
        ratio = self.seconds / max(since.seconds, 1e-12)
        return not 0.85 < ratio < 1.15 or self.waits > since.waits + 0.1


@dataclass(frozen=True)
class Attempt:
    """The next thing to try: a schedule (None: the plain loop) for so many measured steps.

    It ends after the first of them where that took more than `give_up` for a unit of work.
    """

    schedule: Schedule | None
    steps: int
    give_up: float = math.inf


@dataclass(frozen=True)
class Choice:
    """What to continue with (None: the plain loop), and one line that says why."""

    schedule: Schedule | None
    why: str


def search(candidates: Sequence[Schedule]) -> Generator[Attempt, Trial, Choice]:
    """Yield what to try, take what it took, and return the choice.

    `candidates` are one schedule that does not cut batches, one that does, or both. Where the plain
    loop has little to hide, nothing else is tried; where a step that is not cut exchanges little,
    as on one rank, a cut one is not tried, because a cut hides nothing else. A try that is far
    slower than the plain loop ends early. A schedule is chosen only when it was far faster than the
    plain loop before and after it, or faster in a longer comparison.
    """
    plain = yield Attempt(None, SHORT)
    if plain.waits < WORTH_TRYING:
        reason = f"lookups and exchange are {_percent(plain.waits)} of a step, too little to hide"
        return Choice(None, plain_because(reason))
    trials: list[tuple[Schedule, Trial]] = []
    for schedule in candidates:
        if schedule.cuts_batches and trials and not _exchanges(trials[-1][1]):
            continue
        give_up = _HOPELESS * plain.seconds
        trials.append((schedule, (yield Attempt(schedule, SHORT, give_up))))
    tried, trial = min(trials, key=lambda each: each[1].seconds)
    if trial.seconds > _CLOSE * plain.seconds:
        return Choice(None, _slower(plain, tried, trial))
    best = _with_best_numbers([each for each in trials if each[1].seconds <= give_up])
    again = yield Attempt(None, SHORT)
    if best != tried or trial.seconds > _CLEAR * min(plain.seconds, again.seconds):
        again = yield Attempt(None, LONG)
        trial = yield Attempt(best, LONG)
    plain = again
    if trial.seconds > _WORTH_IT * plain.seconds:
        return Choice(None, _slower(plain, best, trial))
    return Choice(
        best,
        f"schedule: {describe(best)}: lookups and exchange are {_percent(plain.waits)} of a step, "
        f"{_percent(trial.waits)} remain; a step takes {_percent(trial.seconds / plain.seconds)} "
        "of the plain loop's time",
    )


def _exchanges(trial: Trial) -> bool:
    """Whether the steps of a schedule exchange enough for a cut to hide."""
    found = trial.probe
    return found is None or found.exchange + found.reduce >= WORTH_TRYING * found.step


def _with_best_numbers(trials: Sequence[tuple[Schedule, Trial]]) -> Schedule:
    """Return the schedule to compare: of both kinds the one that `choose` predicts to be best."""
    whole, whole_trial = trials[0]
    assert whole_trial.probe is not None
    if len(trials) == 1:
        if whole.cuts_batches:
            return whole
        seen = whole_trial.probe
        expected = max(seen.compute + seen.exchange + seen.reduce, seen.table)
        return make_schedule(whole.name, buffers_ahead=_buffers(seen, expected))
    cut, cut_trial = trials[1]
    assert cut_trial.probe is not None
    best, _ = choose(cut, whole_trial.probe, cut_trial.probe)
    if best.micro_batches > 1:
        return best
    return make_schedule(whole.name, buffers_ahead=best.buffers_ahead)


def describe(schedule: Schedule) -> str:
    """Name a schedule and its numbers."""
    parts = f" with {schedule.micro_batches} micro-batches" if schedule.cuts_batches else ""
    ahead = schedule.buffers_ahead
    return f"{schedule.name}{parts}" + (f" and {ahead} buffers ahead" if ahead > 1 else "")


def plain_because(reason: str) -> str:
    """Return the line that explains the plain loop."""
    return f"schedule: the plain loop: {reason}"


def _slower(plain: Trial, schedule: Schedule, trial: Trial) -> str:
    return plain_because(
        f"lookups and exchange are {_percent(plain.waits)} of a step, but {describe(schedule)} "
        f"takes {_percent(trial.seconds / plain.seconds)} of its time"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def probes_from_means(probes: Mapping[int, list[float]]) -> dict[int, Probe]:
    """Make probes again from the values that all ranks have averaged."""
    return {
        micro_batches: Probe(micro_batches, *values) for micro_batches, values in probes.items()
    }


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"
