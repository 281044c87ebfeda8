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
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.local_ranks import run_ranks
from benchmarks.pipeline.link import (
    Namespaces,
    burst_bytes,
    can_make_namespaces,
    joined_namespaces,
)
from benchmarks.pipeline.rank import Setting
from benchmarks.simulate.reality_rank import EXCHANGED_BYTES
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
LINK_LOAD = 1.4  # where plain exchanges are timed; no schedule is compared at this rate
DISK_READS = 1.0  # reads of a serial step take so many times its compute
PRESENT = "present"
MODELS = ("first", "second", PRESENT)  # of the link; older ones stand beside the present one
SIMULATED, SETTLED = 14, 5  # steps; the first ones and those near the end do not count


@dataclass(frozen=True)
class LinkCurve:
    """What an exchange costs a card, by its bytes: messages both ways hold each other up.

    The words that bytes have arrived wait behind the messages of the other direction, so a long
    exchange between two ranks takes up to 1.7 times as long as its bytes alone.
    """

    rate: float
    wake: float  # seconds of an exchange of nothing
    seconds: Sequence[float]  # of exchanges of EXCHANGED_BYTES

    def factor(self, sent: float) -> float:
        """Return by how much an exchange of so many bytes takes longer than they alone."""
        burst = burst_bytes(self.rate)
        whole = [(taken - self.wake) * self.rate + burst for taken in self.seconds]
        factors = [
            max(1.0, bytes_held / size)
            for bytes_held, size in zip(whole, EXCHANGED_BYTES, strict=True)
        ]
        return float(np.interp(sent, (burst, *EXCHANGED_BYTES), (1.0, *factors)))


@dataclass(frozen=True)
class Calibration:
    """What the metered serial steps of one number of ranks and one tier gave."""

    ranks: list[dict[str, Any]]
    exchanges: Mapping[str, Any] | None = None  # rate and seconds of plain exchanges

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

    @cached_property
    def curve(self) -> LinkCurve | None:
        """The curve of the link, where plain exchanges were timed."""
        if self.exchanges is None:
            return None
        return LinkCurve(self.exchanges["rate"], self.wake("idle"), self.exchanges["seconds"])

    def wake(self, core: str) -> float:
        """Return the seconds until a thread on an `idle` or `busy` core runs after a message."""
        return median([one[f"wake_{core}"] for one in self.ranks])

    def costs(
        self, schedule: Schedule, read_rate: float | None, curve: LinkCurve | None = None
    ) -> "ScheduleCosts":
        """Return what the tasks of a schedule take, from serial steps cut alike."""
        return ScheduleCosts(self, schedule, read_rate, curve)


def _sum(parts: Sequence[Sequence[float]], what: int) -> float:
    return sum(part[what] for part in parts)


class ScheduleCosts:
    """What each task of a schedule takes on each rank."""

    def __init__(
        self,
        calibration: Calibration,
        schedule: Schedule,
        read_rate: float | None,
        curve: LinkCurve | None,
    ) -> None:
        self.ranks, self.schedule, self.read_rate = calibration.ranks, schedule, read_rate
        self.curve = curve
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
            if self.curve is not None and rounds:
                sent *= self.curve.factor(sent / rounds)
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
        note(f"{ranks} ranks, {tier}: plain exchanges")
        rate_of_plain = sent / (LINK_LOAD * compute)
        link.set_rate(rate_of_plain)
        plain = launch(setting, "link", link)["exchange_seconds"]
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
    return {
        "ranks": ranks,
        "tier": tier,
        "metered": metered["ranks"],
        "exchanges": {"rate": rate_of_plain, "seconds": plain},
        "rows": rows,
    }


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
    model: str = PRESENT,
) -> float:
    """Return the simulated seconds of a step, by one of MODELS."""
    schedule = make_schedule(name, micro_batches=micro_batches)
    queues = model != "first"
    curve = known.curve if model == PRESENT else None
    clock = SharedClock(
        schedule,
        [one["core"] for one in known.ranks],
        rate,
        queue=queues,
        burst=burst_bytes(rate) if curve and rate else 0.0,
        words=queues,
        wake_idle=known.wake("idle"),
        wake_busy=known.wake("busy" if queues else "idle"),
    )
    ends = clock.run(SIMULATED, known.costs(schedule, read_rate, curve if rate else None))
    last = SIMULATED - 1 - max(stage.ahead for stage in schedule.stages)
    return (ends[last] - ends[SETTLED]) / (last - SETTLED)


def compare(part: Mapping[str, Any]) -> list[Row]:
    """Simulate what one part measured; a row per schedule and rate."""
    known = Calibration(part["metered"], part.get("exchanges"))
    rows: list[Row] = []
    for setting in part["rows"]:
        for name, micro_batches in SCHEDULES:
            samples = setting["samples"][f"{name} {micro_batches}"]
            measured = median(samples)
            rates = setting["rate"], setting["read_rate"]
            simulated = {
                model: simulated_step(known, name, micro_batches, *rates, model) for model in MODELS
            }
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
                    "simulated_ms": 1e3 * simulated[PRESENT],
                    "error": simulated[PRESENT] / measured - 1,
                    **{
                        f"error_{model}_model": simulated[model] / measured - 1
                        for model in MODELS
                        if model != PRESENT
                    },
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
