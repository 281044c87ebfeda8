"""`train.schedule=auto`, its tries included, against the plain loop and schedules set by hand.

Six settings: tables in memory or on disk, one rank or two, a link and a disk that are free or
limited. Variants take turns; every sample is a whole run. Finished runs are kept in
runs/auto_schedule-bench, so a stopped benchmark continues where it was. The protocol is
benchmarks/protocols/auto_schedule.md.
"""

import contextlib
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.auto_schedule.rank import Job
from benchmarks.local_ranks import run_ranks
from benchmarks.pipeline.link import Namespaces, can_make_namespaces, joined_namespaces
from slipstream.bench.harness import Row, finish, median, note, spread
from slipstream.data.preparation import Choices, prepare
from slipstream.data.synthetic import Synthetic
from slipstream.errors import SlipstreamError
from slipstream.files import read_json, write_json

WORK = Path("runs/auto_schedule-bench")
PLAIN, AUTO = ("synchronous", 8), ("auto", 8)
VARIANTS = (PLAIN, AUTO, ("dual_buffer", 8), ("frozen_window", 8), ("nested", 4), ("nested", 8))
READ_SHARE, LINK_SHARE = 0.7, 0.4  # of a free step: what limited reads and messages take
REPEATS = 5
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


class Runs:
    """The runs of a benchmark; those that `work` already holds are not repeated."""

    def __init__(self, work: Path, base: Job, link: Namespaces | None) -> None:
        self.path, self.base, self.link = work / "samples.json", base, link
        work.mkdir(parents=True, exist_ok=True)
        kept = read_json(self.path) if self.path.exists() else {"base": asdict(base)}
        if kept["base"] != asdict(base):
            raise SlipstreamError(
                f"{self.path} holds runs of other sizes; remove it to start the benchmark anew"
            )
        self.kept: dict[str, Any] = kept

    def sample(self, key: str, job: Job, link_rate: float | None = None) -> Sample:
        """Run a job once, ever; `link_rate` limits both directions, in bytes a second."""
        if key not in self.kept:
            if self.link is not None and job.ranks > 1:
                self.link.set_rate(link_rate)
            self.kept[key] = launch(job, self.link)
            write_json(self.path, self.kept)
        found: Sample = self.kept[key]
        return found


def launch(job: Job, link: Namespaces | None) -> Sample:
    """Run the ranks of a job, each at its end of the link, and return what rank 0 found."""
    places: dict[str, Any] = {}
    if link is not None and job.ranks > 1:
        places = {"prefix": link.command, "environment": link.environment}
    with tempfile.TemporaryDirectory(prefix="slipstream-auto-") as scratch:
        found: Sample = run_ranks(
            "benchmarks.auto_schedule.rank",
            [scratch, json.dumps(asdict(job))],
            world=job.ranks,
            seconds_allowed=job.seconds_allowed,
            **places,
        )
    return found


def limits(setting: Setting, job: Job, free: Sample) -> tuple[float | None, float | None]:
    """Return rows read (a rank) and bytes sent a second that give a free step the fixed shares."""
    rows = free["distinct_rows"] / setting.ranks
    reads = rows / (READ_SHARE * free["step_seconds"]) if setting.slow_disk else None
    # Half of a rank's rows are the other's: their weights come, their gradients go.
    sent = 2 * 4 * job.dim * rows * (1 - 1 / setting.ranks)
    return reads, sent / (LINK_SHARE * free["step_seconds"]) if setting.slow_link else None


def measure(runs: Runs, setting: Setting, repeats: int, place: str) -> dict[str, list[Sample]]:
    """Run every variant in turns; one run of the plain loop before them is a warm-up."""
    job = replace(runs.base, ranks=setting.ranks, tier=setting.tier)
    read_rate = link_rate = None
    if setting.slow_disk or setting.slow_link:
        note(f"{place} {setting.name}: the plain loop without limits")
        free = runs.sample(f"{setting.name}: free", replace(job, steps=min(job.steps, 60)))
        read_rate, link_rate = limits(setting, job, free)
    samples: dict[str, list[Sample]] = {}
    for repeat in range(repeats + 1):
        warm_up = repeats > 0 and repeat == 0
        for schedule, micro_batches in (PLAIN,) if warm_up else VARIANTS:
            variant = f"{schedule} {micro_batches}"
            note(f"{place} {setting.name}, turn {repeat} of {repeats}: {variant}")
            numbers = {"schedule": schedule, "micro_batches": micro_batches}
            chosen = replace(job, read_rate=read_rate, **numbers)  # type: ignore[arg-type]
            key = f"{setting.name}: {variant}: {repeat}"
            found = runs.sample(key, chosen, link_rate)
            if not warm_up:
                samples.setdefault(variant, []).append(found)
    return samples


def rows_of(setting: str, samples: dict[str, list[Sample]]) -> list[Row]:
    """Make one row per variant of a setting; refuse runs that did not learn the same."""
    plain = samples[f"{PLAIN[0]} {PLAIN[1]}"]
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
    auto = f"{AUTO[0]} {AUTO[1]}"
    vs_best = [
        min(row["step_ms"] for name, row in variants.items() if name != auto)
        / variants[auto]["step_ms"]
        for variants in by_setting.values()
    ]
    vs_plain = [variants[auto]["vs_plain"] for variants in by_setting.values()]
    return {"worst_vs_plain": min(vs_plain), "worst_vs_best": min(vs_best)}


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
            base = replace(base, steps=24, users=4, length=24, dim=16, cache_rows=32)
            settings, repeats = (SETTINGS[1], SETTINGS[3]), 0
        elif can_make_namespaces():
            link = held.enter_context(joined_namespaces())
        else:
            note("no network namespaces here (they need root): two ranks are left out")
            settings = tuple(setting for setting in SETTINGS if setting.ranks == 1)
        runs, rows = Runs(work, base, link), list[Row]()
        for number, setting in enumerate(settings, 1):
            samples = measure(runs, setting, repeats, f"{number}/{len(settings)}")
            rows += rows_of(setting.name, samples)
        claims = claims_of(rows) if len(settings) == len(SETTINGS) or quick else {}
        return finish("auto_schedule", rows, claims, json_path)
