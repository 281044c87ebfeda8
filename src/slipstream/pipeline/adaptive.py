"""Chooses the number of micro-batches and buffers from the times of a run's first steps.

A step is probed whole and cut. Cutting costs compute (smaller kernels) and exchange (keys that
travel again), and leaves only the first rows and the last gradients exposed: 1/N of the exchange.
Both costs are taken as linear in N between the two probes. Where the cut step is no faster as
measured, nothing is cut: there was nothing to hide. More buffers than one are filled ahead where
retrieval fits into a step on average, but not always. Touch this to choose by another rule.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from slipstream.pipeline.schedule import Schedule, make_schedule
from slipstream.pipeline.trace import Interval

WARM_UP, PROBED = 2, 4  # steps before, and steps of, each probe
PROBES = 2 * (WARM_UP + PROBED)  # steps before a choice is made
CANDIDATES = (1, 2, 4, 8, 16, 32)
_WORTH_IT = 0.98  # a cut must make a step this much shorter, as measured


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
    step_seconds = (ends[steps[-1]] - ends[steps[0]]) / (len(steps) - 1) if len(steps) > 1 else 0.0
    longest = max((one["table"] for one in taken.values()), default=0.0)
    return Probe(
        micro_batches,
        step_seconds,
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
    expected = predicted(whole, cut, micro_batches)
    buffers = 2 if whole.table < expected < whole.longest_table else 1
    why += f"; looking up takes {_ms(whole.table)}, at most {_ms(whole.longest_table)}"
    sentence = (
        f"schedule {schedule.name}: {micro_batches} micro-batches, {buffers} "
        f"buffer{'s' * (buffers > 1)} ahead, because {why}"
    )
    ahead = buffers if schedule.buffers_ahead else None
    return make_schedule(schedule.name, micro_batches=micro_batches, buffers_ahead=ahead), sentence


def probes_from_means(probes: Mapping[int, list[float]]) -> dict[int, Probe]:
    """Make probes again from the values that all ranks have averaged."""
    return {
        micro_batches: Probe(micro_batches, *values) for micro_batches, values in probes.items()
    }


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"
