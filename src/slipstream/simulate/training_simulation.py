"""Simulated training: a schedule of the pipeline on a cluster, in milliseconds of real time.

    report = simulate_training("nestpipe", "nested", workers=1536)
    report.step_seconds, report.exposed_comm, report.intervals    # one worker's timeline

The stages, lanes and hazards are those of `pipeline/`; what each task takes comes from the cluster
file. Touch this when a report shows something else.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import SlipstreamError
from slipstream.pipeline.schedule import Schedule, make_schedule
from slipstream.pipeline.trace import Interval, shares
from slipstream.simulate.cluster import Cluster, open_cluster
from slipstream.simulate.hardware_times import hardware_stages
from slipstream.simulate.lane_clock import LaneClock
from slipstream.simulate.step_times import StageSeconds, StepTimes, shares_of

STEPS = 12  # by default, after the warm-up
_DISTINCT = 16  # global batches that are drawn; longer runs take them in a circle
_DRAWN_SAMPLES = 200_000  # of all global batches together: larger batches are drawn less often
_WATCHED = 4  # workers whose lanes are recorded, the one with the mean load first
EXPOSED = ("exposed_lookup", "exposed_comm", "exposed_input")


@dataclass(frozen=True)
class TrainingReport:
    """A simulated training: shares are of a step, means over the watched workers."""

    cluster: str
    schedule: str
    workers: int
    shards: int
    replicas: int
    micro_batches: int
    buffers_ahead: int
    step_seconds: float
    compute_seconds: float  # of the mean worker
    samples_per_second: float
    exposed_lookup: float
    exposed_comm: float
    exposed_input: float
    imbalance: float  # (slowest worker's compute - mean) / step
    busy: dict[str, float]  # share of a step that each lane works
    efficiency: float | None = None  # weak scaling over the smallest number of workers
    intervals: list[Interval] = field(default_factory=list, repr=False)

    @property
    def compute_utilisation(self) -> float:
        """Share of a step in which the mean worker computes."""
        return self.compute_seconds / self.step_seconds

    @property
    def bound(self) -> str:
        """The lane that works longest: a step cannot be shorter than that."""
        return max(self.busy, key=lambda lane: self.busy[lane])

    def row(self) -> dict[str, Any]:
        """Return the figures without the timeline, as JSON values."""
        values = {name: value for name, value in asdict(self).items() if name != "intervals"}
        return values | {"compute_utilisation": self.compute_utilisation, "bound": self.bound}


def simulate_training(
    cluster: Cluster | str | Path | dict[str, Any],
    schedule: str | Schedule = "nested",
    *,
    workers: int | None = None,
    replicas: int | None = None,
    micro_batches: int | None = None,
    buffers_ahead: int | None = None,
    steps: int = STEPS,
    seed: int = 0,
) -> TrainingReport:
    """Simulate `steps` steps and return what one takes, what stays exposed, and a timeline.

    `workers` and `replicas` default to the cluster file's.
    """
    place = open_cluster(cluster)
    plan = schedule
    if isinstance(plan, str):
        plan = make_schedule(plan, micro_batches=micro_batches, buffers_ahead=buffers_ahead)
    shards, copies = _mesh(place, workers, replicas)
    if steps < 1:
        raise SlipstreamError(f"simulate at least one step, not {steps}")
    warm_up = 2 + max(stage.ahead for stage in plan.stages)
    drawn = _Loads(place, shards * copies, min(steps + warm_up, _DISTINCT), seed)
    times = StepTimes(plan, _stages(place, plan, shards, copies), _shares(place, plan), drawn)
    clock = LaneClock(plan, shards, copies, drawn.watched())
    found = clock.run(steps + warm_up, times)
    return _report(place, plan, clock, times, found.ends_S, found.intervals, warm_up, drawn)


def scale_training(
    cluster: Cluster | str | Path | dict[str, Any],
    schedule: str | Schedule,
    workers: Sequence[int],
    **settings: Any,
) -> list[TrainingReport]:
    """Simulate several numbers of workers; efficiency is relative to the first of them."""
    found = [simulate_training(cluster, schedule, workers=each, **settings) for each in workers]
    base = found[0].samples_per_second / found[0].workers
    return [
        replace(each, efficiency=each.samples_per_second / each.workers / base) for each in found
    ]


def _mesh(cluster: Cluster, workers: int | None, replicas: int | None) -> tuple[int, int]:
    """Return shards and replicas."""
    number, copies = workers or cluster.workers, replicas or cluster.replicas
    if number < 1 or number % copies:
        raise SlipstreamError(
            f"{number} workers cannot hold {copies} replicas of the tables: the number of workers "
            "must be a multiple of the replicas"
        )
    return number // copies, copies


def _stages(
    cluster: Cluster, schedule: Schedule, shards: int, replicas: int
) -> dict[str, StageSeconds]:
    if cluster.phases is not None:
        return cluster.phases.stages(shards, replicas)
    assert cluster.workload is not None
    return hardware_stages(cluster, cluster.workload, schedule, shards, replicas)


def _shares(cluster: Cluster, schedule: Schedule) -> np.ndarray:
    return shares_of(schedule, cluster.taper)


class _Loads:
    """How large each worker's batch is, step by step, and how slow each worker."""

    def __init__(self, cluster: Cluster, workers: int, steps: int, seed: int) -> None:
        rng, spread = np.random.default_rng([seed, workers]), cluster.spread
        loads = [np.ones(workers)] * steps
        if cluster.workload is not None and workers > 1:
            affordable = _DRAWN_SAMPLES // (cluster.workload.samples * workers)
            distinct = [
                cluster.workload.draw_loads(workers, rng)[0]
                for _ in range(max(1, min(steps, affordable)))
            ]
            loads = [distinct[step % len(distinct)] for step in range(steps)]
        slow_W = np.where(rng.random(workers) < 0.01, 1 + spread.slowest, 1.0)
        self.loads_SW = np.array(
            [
                load_W * slow_W * np.maximum(0.1, 1 + spread.compute * rng.standard_normal(workers))
                for load_W in loads
            ]
        )

    def __call__(self, step: int) -> np.ndarray:
        load_W: np.ndarray = self.loads_SW[step % len(self.loads_SW)]
        return load_W

    def watched(self) -> list[int]:
        """Return a few workers, from the mean load to the largest."""
        order = np.argsort(self.loads_SW.mean(axis=0), kind="stable")
        places = np.linspace(len(order) // 2, len(order) - 1, min(_WATCHED, len(order)))
        return [int(order[int(place)]) for place in places]


def _report(
    cluster: Cluster,
    schedule: Schedule,
    clock: LaneClock,
    times: StepTimes,
    ends_S: np.ndarray,
    intervals: list[list[Interval]],
    warm_up: int,
    loads: _Loads,
) -> TrainingReport:
    first, last = warm_up - 1, len(ends_S) - 1
    step = float(ends_S[last] - ends_S[first]) / (last - first)
    told = [shares(one, first, last) for one in intervals]
    mean = {name: float(np.mean([one.get(name, 0.0) for one in told])) for name in told[0]}
    compute = times.compute_seconds
    slowest = float(loads.loads_SW.max(axis=1).mean() - loads.loads_SW.mean())
    return TrainingReport(
        cluster=cluster.name,
        schedule=schedule.name,
        workers=clock.workers,
        shards=clock.shards,
        replicas=clock.replicas,
        micro_batches=schedule.micro_batches,
        buffers_ahead=schedule.buffers_ahead,
        step_seconds=step,
        compute_seconds=compute,
        samples_per_second=clock.workers * cluster.samples / step,
        **{name: mean[name] for name in EXPOSED},
        imbalance=slowest * compute / step,
        busy={
            name.removeprefix("busy_"): value
            for name, value in mean.items()
            if name.startswith("busy_")
        },
        intervals=intervals[0],
    )
