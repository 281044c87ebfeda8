"""The simulator against this machine: every schedule at several link rates, 2 and 4 ranks.

First the serial schedule without any limit is metered, stage by stage: that is all the simulator
gets. Then every schedule is timed at every rate, and simulated. Each part (ranks, tier) is
measured by one call and kept in runs/simulate, so that a part takes a few minutes. Touch this when
another setting is compared.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.local_ranks import run_ranks
from benchmarks.pipeline.link import Namespaces, can_make_namespaces, joined_namespaces
from benchmarks.pipeline.rank import Setting
from slipstream.bench.harness import Row, median, note, spread
from slipstream.errors import SlipstreamError
from slipstream.files import atomic_file
from slipstream.pipeline.hazards import Task
from slipstream.pipeline.schedule import Schedule, make_schedule
from slipstream.simulate.shared_clock import RankTask, SharedClock

JOURNAL = Path("runs/simulate")
SCHEDULES = (
    ("serial", 1),
    ("dual_buffer", 1),
    ("frozen_window", 8),
    ("nested", 8),
    ("semi_async", 1),
    ("six_stage", 1),
)
BASE = Setting(
    users=8,
    length=1024,
    items=20_000,
    cache_rows=64,
    steps=4,
    warm_up=2,
    repeats=3,
    variants=SCHEDULES,
    seconds_allowed=280,
)
MEETING = frozenset(("route", "answer", "collect", "reduce"))
# The bytes of a serial step take so many times its compute; None: no limit.
MEMORY_LOADS: tuple[float | None, ...] = (None, 0.2, 0.5, 1.0, 2.0)
DISK_LOADS: tuple[float | None, ...] = (0.5, 1.0)
DISK_READS = 1.0  # reads of a serial step take so many times its compute
SIMULATED, SETTLED = 14, 5  # steps; the first ones and those near the end do not count


@dataclass(frozen=True)
class Calibration:
    """What the metered serial steps of one number of ranks and one tier gave."""

    ranks: list[dict[str, Any]]

    def compute(self) -> float:
        """Return the processor seconds of compute in a whole step, the mean over ranks."""
        return self._mean("compute", 1)

    def sent(self) -> float:
        """Return the bytes a rank sends in a serial step."""
        totals = [
            sum(_sum(parts, 2) for parts in one["stages"]["1"].values()) for one in self.ranks
        ]
        return sum(totals) / len(totals)

    def _mean(self, stage: str, what: int) -> float:
        return sum(_sum(one["stages"]["1"][stage], what) for one in self.ranks) / len(self.ranks)

    def costs(self, schedule: Schedule, read_rate: float | None) -> "ScheduleCosts":
        """Return what the tasks of a schedule take, from serial steps cut alike."""
        return ScheduleCosts(self, schedule, read_rate)


def _sum(parts: Sequence[Sequence[float]], what: int) -> float:
    return sum(part[what] for part in parts)


class ScheduleCosts:
    """What each task of a schedule takes on each rank."""

    def __init__(
        self, calibration: Calibration, schedule: Schedule, read_rate: float | None
    ) -> None:
        self.ranks, self.schedule, self.read_rate = calibration.ranks, schedule, read_rate
        self.cut = str(schedule.micro_batches)

    def __call__(self, rank: int, task: Task) -> RankTask:
        stages = self.ranks[rank]["stages"][self.cut]
        keys = self.ranks[rank]["keys"]
        overlap = keys["overlap"] if self.schedule.buffers_ahead else 0.0
        name = task.stage
        if name in ("synchronise", "refresh"):
            return RankTask(overlap * _sum(stages["retrieve"], 1) * (self.read_rate is None))
        if name == "update_rows":
            return RankTask(_sum(stages["update"], 1) / 2)
        part = stages[name][task.micro] if len(stages[name]) > 1 else stages[name][0]
        _, cpu, sent, rounds = part
        if name == "update" and "update_rows" in self.schedule:
            return RankTask(cpu / 2)
        if name == "retrieve":
            reads = (1 - overlap) * keys["keys"]
            return RankTask(
                (1 - overlap) * cpu, waits=reads / self.read_rate if self.read_rate else 0
            )
        if name in MEETING:
            return RankTask(cpu, sent, rounds=round(rounds))
        return RankTask(cpu)


def launch(setting: Setting, parts: str, link: Namespaces) -> dict[str, Any]:
    """Run the ranks, each in its namespace, and return what they found."""
    with tempfile.TemporaryDirectory(prefix="slipstream-reality-") as scratch:
        found: dict[str, Any] = run_ranks(
            "benchmarks.simulate.reality_rank",
            [scratch, json.dumps(asdict(setting)), parts],
            world=setting.world,
            seconds_allowed=setting.seconds_allowed,
            prefix=link.command,
            environment=link.environment,
        )
        return found


def measure(ranks: int, tier: str, base: Setting = BASE) -> dict[str, Any]:
    """Meter the serial schedule, then time every schedule at every rate of a tier."""
    if not can_make_namespaces():
        raise SlipstreamError("the reality check needs network namespaces: root on Linux")
    setting = replace(base, world=ranks, tier=tier)
    with joined_namespaces(ranks) as link:
        note(f"{ranks} ranks, {tier}: metering the serial schedule")
        link.set_rate(None)
        metered = launch(setting, "meter", link)
        known = Calibration(metered["ranks"])
        compute, sent = known.compute(), known.sent()
        rows = []
        for load in MEMORY_LOADS if tier == "memory" else DISK_LOADS:
            rate = None if load is None else sent / (load * compute)
            reads = metered["ranks"][0]["keys"]["keys"] / (DISK_READS * compute)
            pace = reads if tier == "disk" else None
            link.set_rate(rate)
            note(f"{ranks} ranks, {tier}, exchange {load or 0:g} times compute")
            timed = launch(replace(setting, read_rate=pace), "time", link)
            samples = {
                name: [one["step_seconds"] for one in found]
                for name, found in timed["variants"].items()
            }
            rows.append({"load": load, "rate": rate, "read_rate": pace, "samples": samples})
    return {"ranks": ranks, "tier": tier, "metered": metered["ranks"], "rows": rows}


def record(ranks: int, tier: str, base: Setting = BASE) -> Path:
    """Measure one part and keep it."""
    path = JOURNAL / f"reality-{ranks}-{tier}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    found = measure(ranks, tier, base)
    with atomic_file(path) as temporary:
        Path(temporary).write_text(json.dumps(found, indent=1))
    return path


def simulated_step(
    known: Calibration,
    name: str,
    micro_batches: int,
    rate: float | None,
    read_rate: float | None,
    queue: bool = True,
    words: bool = True,
    wakes: bool = True,
) -> float:
    """Return the simulated seconds of a step."""
    schedule = make_schedule(name, micro_batches=micro_batches)
    cores = [one["core"] for one in known.ranks]
    idle, busy = (median([one[name] for one in known.ranks]) for name in ("wake_idle", "wake_busy"))
    clock = SharedClock(
        schedule,
        cores,
        rate,
        queue=queue,
        words=words,
        wake_idle=idle,
        wake_busy=busy if wakes else idle,
    )
    ends = clock.run(SIMULATED, known.costs(schedule, read_rate))
    last = SIMULATED - 1 - max(stage.ahead for stage in schedule.stages)
    return (ends[last] - ends[SETTLED]) / (last - SETTLED)


def compare(part: Mapping[str, Any]) -> list[Row]:
    """Simulate what one part measured; a row per schedule and rate."""
    known = Calibration(part["metered"])
    rows: list[Row] = []
    for setting in part["rows"]:
        for name, micro_batches in SCHEDULES:
            samples = setting["samples"][f"{name} {micro_batches}"]
            measured = median(samples)
            rates = setting["rate"], setting["read_rate"]
            simulated, first = (
                simulated_step(
                    known, name, micro_batches, *rates, queue=whole, words=whole, wakes=whole
                )
                for whole in (True, False)
            )
            load = "no limit" if setting["load"] is None else f"{setting['load']:g}"
            rows.append(
                {
                    "variant": f"{part['ranks']} ranks, {part['tier']}, {load}: {name}",
                    "part": "reality",
                    "ranks": part["ranks"],
                    "tier": part["tier"],
                    "load": load,
                    "schedule": name,
                    "measured_ms": 1e3 * measured,
                    "simulated_ms": 1e3 * simulated,
                    "error": simulated / measured - 1,
                    "error_first_model": first / measured - 1,
                    "spread": spread(samples),
                    "samples": samples,
                }
            )
    return rows


def measure_part(
    ranks: Annotated[int, typer.Argument(min=2, max=4, help="2 or 4 ranks.")],
    tier: Annotated[str, typer.Argument(help="memory or disk.")],
) -> None:
    """Measure one part of the reality check on this machine; it takes a few minutes."""
    if tier not in ("memory", "disk"):
        raise SlipstreamError(f"a tier is memory or disk, not '{tier}'")
    typer.echo(f"measured: {record(ranks, tier)}")
