"""`train.schedule=auto`, its tries included, against the plain loop and schedules set by hand.

Six settings: tables in memory or on disk, one rank or two, a link and a disk that are free or
limited. Variants take turns, a hundred steps each; every sample is a whole run. Finished turns are
kept in runs/auto_schedule-bench, so a stopped benchmark continues where it was. The protocol is
benchmarks/protocols/auto_schedule.md.
"""

import contextlib
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.auto_schedule.rank import Job
from benchmarks.auto_schedule.turns import take_turns
from benchmarks.local_ranks import run_ranks
from benchmarks.pipeline.link import Namespaces, can_make_namespaces, joined_namespaces
from slipstream.bench.harness import Row, finish, median, note, spread
from slipstream.data.preparation import Choices, prepare
from slipstream.data.synthetic import Synthetic
from slipstream.errors import SlipstreamError
from slipstream.files import read_json, write_json

WORK = Path("runs/auto_schedule-bench")
PLAIN, AUTO, AGAIN = "synchronous", "auto", "synchronous again"
VARIANTS = {
    PLAIN: ("synchronous", 8),
    AUTO: ("auto", 8),
    AGAIN: ("synchronous", 8),  # the same once more: how far apart equal runs are
    "dual_buffer": ("dual_buffer", 8),
    "frozen_window 8": ("frozen_window", 8),
    "nested 4": ("nested", 4),
    "nested 8": ("nested", 8),
}
READ_SHARE, LINK_SHARE = 0.7, 0.4  # of a free step: what limited reads and messages take
REPEATS = 3
LOSS_TOLERANCE = 1e-4  # of the mean loss over the first steps, between runs of one setting
Sample = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """Where the variants of one comparison run."""

    name: str
    ranks: int = 1
    tier: str = "memory"
    slow_disk: bool = False
    slow_link: bool = False


SETTINGS: tuple[Setting, ...] = (
    Setting("memory"),
    Setting("disk", tier="disk"),
    Setting("slow disk", tier="disk", slow_disk=True),
    Setting("two ranks", ranks=2),
    Setting("slow link", ranks=2, slow_link=True),
    Setting("slow disk and link", ranks=2, tier="disk", slow_disk=True, slow_link=True),
)


class Turns:
    """The turns of a benchmark; those that `work` already holds are not repeated."""

    def __init__(self, work: Path, base: Job, link: Namespaces | None) -> None:
        self.path, self.base, self.link = work / "turns.json", base, link
        work.mkdir(parents=True, exist_ok=True)
        kept = read_json(self.path) if self.path.exists() else {"base": asdict(base)}
        if kept["base"] != asdict(base):
            raise SlipstreamError(
                f"{self.path} holds runs of other sizes; remove it to start the benchmark anew"
            )
        self.kept: dict[str, Any] = kept

    def turn(
        self, key: str, jobs: dict[str, Job], link_rate: float | None = None
    ) -> dict[str, Sample]:
        """Run all jobs once, ever, a few steps of each in turns.

        `link_rate` limits both directions, in bytes a second.
        """
        if key not in self.kept:
            if self.link is not None and any(job.ranks > 1 for job in jobs.values()):
                self.link.set_rate(link_rate)
            self.kept[key] = launch(jobs, self.link)
            write_json(self.path, self.kept)
        found: dict[str, Sample] = self.kept[key]
        return found


def launch(jobs: dict[str, Job], link: Namespaces | None) -> dict[str, Sample]:
    """Run the ranks of all jobs, each at its end of the link, and return what rank 0 found."""

    def runner(job: Job, scratch: str) -> Callable[[], Sample]:
        places: dict[str, Any] = {}
        if link is not None and job.ranks > 1:
            places = {"prefix": link.command, "environment": link.environment}
        return lambda: run_ranks(
            "benchmarks.auto_schedule.rank",
            [scratch, json.dumps(asdict(job))],
            world=job.ranks,
            seconds_allowed=job.seconds_allowed,
            **places,
        )

    with contextlib.ExitStack() as held:
        runs = {}
        for name, job in jobs.items():
            scratch = held.enter_context(tempfile.TemporaryDirectory(prefix="slipstream-auto-"))
            runs[name] = (Path(scratch), runner(job, scratch))
        return take_turns(runs, max(job.seconds_allowed for job in jobs.values()))


def limits(setting: Setting, job: Job, free: Sample) -> tuple[float | None, float | None]:
    """Return rows read (a rank) and bytes sent a second that give a free step the fixed shares."""
    rows = free["distinct_rows"] / setting.ranks
    reads = rows / (READ_SHARE * free["step_seconds"]) if setting.slow_disk else None
    # Half of a rank's rows are the other's: their weights come, their gradients go.
    sent = 2 * 4 * job.dim * rows * (1 - 1 / setting.ranks)
    return reads, sent / (LINK_SHARE * free["step_seconds"]) if setting.slow_link else None


def measure(turns: Turns, setting: Setting, repeats: int, place: str) -> dict[str, list[Sample]]:
    """Run every variant in turns; one run of the plain loop before them is a warm-up."""
    job = replace(turns.base, ranks=setting.ranks, tier=setting.tier)
    note(f"{place} {setting.name}: the plain loop without limits")
    free = turns.turn(f"{setting.name}: free", {"free": replace(job, steps=min(job.steps, 60))})
    read_rate, link_rate = limits(setting, job, free["free"])
    jobs = {}
    for name, (schedule, micro_batches) in VARIANTS.items():
        numbers = {"schedule": schedule, "micro_batches": micro_batches}
        jobs[name] = replace(job, read_rate=read_rate, **numbers)  # type: ignore[arg-type]
    samples: dict[str, list[Sample]] = {}
    for repeat in range(1, max(1, repeats) + 1):
        note(f"{place} {setting.name}, turn {repeat} of {max(1, repeats)}")
        found = turns.turn(f"{setting.name}: {repeat}", jobs, link_rate)
        for name, sample in found.items():
            samples.setdefault(name, []).append(sample)
    return samples


def rows_of(setting: str, samples: dict[str, list[Sample]]) -> list[Row]:
    """Make one row per variant of a setting; refuse runs that did not learn the same."""
    plain = samples[PLAIN]
    expected = median([one["loss"] for one in plain])
    rows = []
    for variant, found in samples.items():
        seconds, loss = [one["step_seconds"] for one in found], median([o["loss"] for o in found])
        if abs(loss - expected) > LOSS_TOLERANCE * abs(expected):
            raise SlipstreamError(
                f"{setting}: {variant} began with a mean loss of {loss:.5f}, the plain loop of "
                f"{expected:.5f}; a schedule is broken, so there is nothing to compare"
            )
        ratios = [p["step_seconds"] / s for p, s in zip(plain, seconds, strict=True)]
        last = found[-1]["phases"][-1] if found[-1]["phases"] else None
        chosen = f"{last['schedule']} {last['micro_batches']}" if last else ""
        row: Row = {"variant": f"{setting}: {variant}", "step_ms": 1e3 * median(seconds)}
        row |= {"spread": spread(seconds), "vs_plain": median(ratios), "loss": loss}
        rows.append({**row, "chosen": chosen, "samples": found})
    return rows


def claims_of(rows: Sequence[Row]) -> dict[str, float]:
    """Return the worst ratios of `auto` over all settings."""
    by_setting: dict[str, dict[str, Row]] = {}
    for row in rows:
        setting, _, variant = row["variant"].partition(": ")
        by_setting.setdefault(setting, {})[variant] = row
    vs_best = [
        min(row["step_ms"] for name, row in variants.items() if name not in (AUTO, AGAIN))
        / variants[AUTO]["step_ms"]
        for variants in by_setting.values()
    ]
    vs_plain = [variants[AUTO]["vs_plain"] for variants in by_setting.values()]
    equal = [abs(variants[AGAIN]["vs_plain"] - 1) for variants in by_setting.values()]
    return {
        "worst_vs_plain": min(vs_plain),
        "worst_vs_best": min(vs_best),
        "equal_runs_differ_by": max(equal),
    }


def run(quick: bool, json_path: Path | None) -> dict[str, Any]:
    """Print the table and the claims; `quick` runs few small steps and no limited setting."""
    with contextlib.ExitStack() as held:
        work = WORK
        if quick:
            work = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="slipstream-auto-")))
        shape = Synthetic(users=60, items=300) if quick else Synthetic(users=4_000, items=20_000)
        store = work / "store"
        if not (store / "store.json").exists():
            note("a synthetic log")
            prepare("synthetic", store, Choices(synthetic=shape), force=True)
        base = Job(str(store.absolute()), ranks=1, tier="memory")
        settings, repeats, link = SETTINGS, REPEATS, None
        if quick:
            base = replace(
                base, steps=24, steps_a_turn=12, users=4, length=24, dim=16, cache_rows=32
            )
            settings, repeats = (SETTINGS[1], SETTINGS[3]), 0
        elif can_make_namespaces():
            link = held.enter_context(joined_namespaces())
        else:
            note("no network namespaces here (they need root): two ranks are left out")
            settings = tuple(setting for setting in SETTINGS if setting.ranks == 1)
        turns, rows = Turns(work, base, link), list[Row]()
        for number, setting in enumerate(settings, 1):
            samples = measure(turns, setting, repeats, f"{number}/{len(settings)}")
            rows += rows_of(setting.name, samples)
        claims = claims_of(rows) if len(settings) == len(SETTINGS) or quick else {}
        return finish("auto_schedule", rows, claims, json_path)
