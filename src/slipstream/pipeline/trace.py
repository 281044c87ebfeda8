"""What ran when: every stage interval of every lane, and the shares of a step that nothing hid.

`exposed_lookup` and `exposed_comm` are what the compute lane waits for retrieval and for exchanges,
divided by the time of a step. A wait is charged to the stage it really waits for: while the awaited
stage had itself to wait for another one, to that other one. Kept in memory up to `limit` steps (the
newest), written as a Chrome trace that Perfetto opens. `processor_seconds` is what lanes take from
compute where they share its core. Touch this to measure or to record more.
"""

import json
import threading
from collections import defaultdict, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.files import atomic_file, read_json
from slipstream.pipeline.schedule import KINDS, PACE, Lane

DENSE = "reduce"  # the stage that exchanges dense gradients


@dataclass(frozen=True)
class Interval:
    """One task as it ran; `cause` is the task it waited for longest, if it had to wait."""

    lane: Lane
    stage: str
    step: int
    micro: int
    ready: float  # when the lane was ready for it
    begin: float
    end: float
    by_caller: bool  # in the compute lane's thread, where everything is exposed
    cause: tuple[str, int, int] | None = None
    cpu: float = 0.0  # processor seconds of the lane's own thread

    @property
    def kind(self) -> str:
        """The kind of the lane's work: input, lookup, comm or compute."""
        return KINDS[self.lane]


class Trace:
    """Intervals of the newest steps, safe to add to from every lane."""

    def __init__(self, limit: int = 512) -> None:
        self._limit, self._lock = limit, threading.Lock()
        self._intervals: deque[Interval] = deque()

    def add(self, interval: Interval) -> None:
        """Add an interval and drop those of the oldest steps."""
        with self._lock:
            self._intervals.append(interval)
            while self._intervals[0].step < interval.step - self._limit:
                self._intervals.popleft()

    def intervals(self, first: int = 0) -> list[Interval]:
        """Return what ran for the steps from `first` on, in the order of its beginning."""
        with self._lock:
            return sorted(
                (each for each in self._intervals if each.step >= first),
                key=lambda each: each.begin,
            )


def shares(intervals: list[Interval], first: int = 0, last: int | None = None) -> dict[str, float]:
    """Return shares of the time from the end of step `first` to the end of step `last`.

    They give what the compute lane did and waited for, and how busy each lane was. What a lane did
    in that time counts, whichever step it did it for.
    """
    until = max((each.step for each in intervals), default=0) if last is None else last
    ends = sorted(
        each.end for each in intervals if each.stage == PACE and first <= each.step <= until
    )
    if len(ends) < 2:
        return {}
    start, stop = ends[0], ends[-1]
    exposed: dict[str, float] = defaultdict(float)
    total: dict[str, float] = defaultdict(float)
    busy: dict[str, float] = defaultdict(float)
    by_task = {(each.stage, each.step, each.micro): each for each in intervals}
    for each in intervals:
        seconds = max(0.0, min(each.end, stop) - max(each.begin, start))
        total[each.kind] += seconds
        busy[each.lane] += seconds
        if each.by_caller:
            exposed[each.kind] += seconds
            exposed["dense"] += seconds if each.stage == DENSE else 0.0
            _charge(each, each.ready, each.begin, by_task, exposed, start, stop)
    whole = stop - start
    found = {
        "step_seconds": whole / (len(ends) - 1),
        "compute_utilisation": total["compute"] / whole,
    }
    for kind in ("lookup", "comm", "input"):
        found[f"exposed_{kind}"] = exposed[kind] / whole
        found[f"{kind}_seconds"] = total[kind] / (len(ends) - 1)
    found["exposed_sparse_comm"] = (
        exposed["comm"] - exposed["dense"]
    ) / whole  # keys, rows and their gradients
    found["exposed_comm_share"] = exposed["comm"] / total["comm"] if total["comm"] else 0.0
    return found | {f"busy_{lane}": seconds / whole for lane, seconds in busy.items()}


def processor_seconds(
    intervals: list[Interval], first: int = 0, last: int | None = None
) -> dict[str, float]:
    """Return each stage's processor time for a step, of the steps after `first` through `last`.

    It is that of the lanes' threads: threads which a stage starts (readers of a disk, messages
    under way) come on top.
    """
    until = max((each.step for each in intervals), default=0) if last is None else last
    found: dict[str, float] = defaultdict(float)
    for each in intervals:
        if first < each.step <= until:
            found[each.stage] += each.cpu / (until - first)
    return dict(found)


def _charge(
    waiting: Interval,
    begin: float,
    end: float,
    by_task: dict[tuple[str, int, int], Interval],
    exposed: dict[str, float],
    start: float,
    stop: float,
) -> None:
    """Divide a wait among the stages it was for, from the newest cause back along the causes."""
    while end > begin and waiting.cause in by_task:
        cause = by_task[waiting.cause]
        since = max(begin, cause.begin)
        seconds = max(0.0, min(end, stop) - max(since, start))
        exposed[cause.kind] += seconds
        exposed["dense"] += seconds if cause.stage == DENSE else 0.0
        waiting, end = cause, min(end, since)
    exposed["idle"] += max(0.0, min(end, stop) - max(begin, start))


def write_trace(path: Path, intervals: list[Interval], about: dict[str, Any]) -> None:
    """Write a Chrome/Perfetto trace: one row per lane, microseconds from the first interval."""
    zero = min((each.begin for each in intervals), default=0.0)
    lanes = list(Lane)
    events: list[dict[str, Any]] = [
        {
            "ph": "M",
            "name": "thread_name",
            "pid": 0,
            "tid": lanes.index(lane),
            "args": {"name": str(lane)},
        }
        for lane in lanes
    ]
    for each in intervals:
        arguments: dict[str, Any] = {
            "step": each.step,
            "micro": each.micro,
            "waited_us": (each.begin - each.ready) * 1e6,
        }
        arguments["by_caller"], arguments["cpu_us"] = each.by_caller, each.cpu * 1e6
        if each.cause is not None:
            arguments["waited_for"] = list(each.cause)
        times = {"ts": (each.begin - zero) * 1e6, "dur": (each.end - each.begin) * 1e6}
        where = {"ph": "X", "pid": 0, "tid": lanes.index(each.lane), "cat": each.kind}
        events.append({"name": each.stage, **where, **times, "args": arguments})
    with atomic_file(path) as temporary:
        temporary.write_text(
            json.dumps({"traceEvents": events, "otherData": about}), encoding="utf-8"
        )


def read_trace(path: Path) -> tuple[list[Interval], dict[str, Any]]:
    """Return the intervals of a written trace, and the run it describes."""
    content = read_json(path)
    lanes = list(Lane)
    try:
        intervals = []
        for event in content["traceEvents"]:
            if event["ph"] != "X":
                continue
            arguments, begin = event["args"], event["ts"] / 1e6
            cause = tuple(arguments["waited_for"]) if "waited_for" in arguments else None
            ready, end = begin - arguments["waited_us"] / 1e6, begin + event["dur"] / 1e6
            place = (lanes[event["tid"]], event["name"], arguments["step"], arguments["micro"])
            cpu = arguments.get("cpu_us", 0.0) / 1e6  # older traces have none
            times = (ready, begin, end)
            intervals.append(Interval(*place, *times, arguments["by_caller"], cause, cpu))
        return intervals, content.get("otherData", {})
    except (KeyError, IndexError, TypeError) as error:
        raise SlipstreamError(
            f"{path} is not a trace of a pipeline: {error!r}; train again to write a new one"
        ) from error
