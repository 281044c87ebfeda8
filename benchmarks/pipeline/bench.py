"""What each schedule hides: two ranks with a table on a slow tier, joined by a slow link.

The baseline is `synchronous`: the shipped plain loop, whose table caches as many rows more as the
buffers of `nested` hold. First a calibration without limits: what its step computes, sends and
reads. Then, for each setting of the sweep, link and tier are slowed so that lookup and
communication take the wanted shares of its step; waiting uses no core. Variants take turns in one
run; shares are measured, not assumed.

`bound` is 1 / the share of the busiest lane in the synchronous step: no schedule of these lanes is
faster. `own_bound` divides by the busiest lane of the schedule itself, which may read or send more.
`utilisation` is the compute time of the synchronous step over the step of the schedule, so time
that lanes take from the compute core counts as lost. Rows of an emulated device let the compute
sleep, which frees the core as an accelerator does. A tier slow by latency is no busy lane: it does
not count for the bound.

`max_diff` is against the plain loop after a few steps; `diff_same_cut` against the serial schedule
with the same micro-batches. The last setting is loopback with tables in memory, where nothing can
be hidden and `nested` chooses its own number of micro-batches. Touch this when a setting or a
variant is added; figures.py makes rows and claims.
"""

import importlib.util
import json
import tempfile
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.local_ranks import run_ranks
from benchmarks.pipeline.clusters import cluster_rows
from benchmarks.pipeline.figures import (
    CORES,
    EMULATED,
    LATENCY,
    OVERLAP,
    PAPER,
    TURBO,
    claims_of,
    medians,
    rows_of,
)
from benchmarks.pipeline.link import Namespaces, can_make_namespaces, joined_namespaces
from benchmarks.pipeline.rank import PEER, PLAIN
from benchmarks.pipeline.setting import Setting
from slipstream.bench.harness import Row, finish, note

Variants = tuple[tuple[str, int], ...]
PAIR: Variants = ((PLAIN, 1), ("nested", 8))
EXACT: Variants = (*PAIR, ("dual_buffer", 1), ("frozen_window", 8))
STALE: Variants = (("semi_async", 1), ("six_stage", 1))
FURTHER: Variants = (*PAIR, ("nested, 2 ahead", 8))
FULL = replace(
    Setting(),
    items=500_000,
    topics=500,
    batches=24,
    cache_rows=4096,
    seconds_allowed=1200,
)
CHECKED_ITEMS = 20_000  # all rows are compared, so there are fewer


@dataclass(frozen=True)
class Point:
    """Shares of lookup and communication in the synchronous step, and the variants compared."""

    lookup: float | None  # None: tables in memory, as TurboGR's are
    comm: float
    variants: Variants
    by_latency: bool = False  # the tier is slow by latency, not by rate
    devices: tuple[str, ...] = (CORES, EMULATED)
    topics: int | None = None  # fewer topics: batches share more rows; None: the setting's


SWEEP = {
    PAPER: Point(0.496, 0.205, EXACT),
    LATENCY: Point(0.496, 0.205, FURTHER, by_latency=True),
    OVERLAP: Point(0.496, 0.205, PAIR, devices=(CORES,), topics=24),
    "NestPipe at 128 workers": Point(0.244, 0.092, PAIR, devices=(CORES,)),
    TURBO: Point(None, 0.25, (*PAIR, *STALE)),
}


@dataclass(frozen=True)
class Limits:
    """How slow link and tier are."""

    link_rate: float  # bytes a second
    read_rate: float | None = None  # rows a second
    latency: float = 0.0  # seconds a call


def launch(setting: Setting, parts: str, link: Namespaces | None) -> dict[str, Any]:
    """Run the ranks, each at its end of the link, and return their figures."""
    with tempfile.TemporaryDirectory(prefix="slipstream-pipeline-") as scratch:
        arguments = [scratch, json.dumps(asdict(setting)), parts]
        places: dict[str, Any] = (
            {} if link is None else {"prefix": link.command, "environment": link.environment}
        )
        return run_ranks(
            "benchmarks.pipeline.rank",
            arguments,
            world=setting.world,
            seconds_allowed=setting.seconds_allowed,
            **places,
        )


def limits(free: dict[str, float], point: Point) -> Limits:
    """Compute the limits that give a free synchronous step the wanted shares."""
    work = free["compute_seconds"] + free["host_seconds"]
    lookup_share = 0.0 if point.lookup is None else point.lookup
    in_memory = free["lookup_seconds"] if point.lookup is None else 0.0
    step = (work + in_memory) / (1 - lookup_share - point.comm)
    link_rate = free["sent_bytes"] / max(point.comm * step - free["comm_seconds"], 1e-4)
    if point.lookup is None:
        return Limits(link_rate)
    waited = max(point.lookup * step - free["lookup_seconds"], 1e-4)
    if point.by_latency:
        return Limits(link_rate, latency=waited)
    return Limits(link_rate, read_rate=max(free["reads"], 1.0) / waited)


def corrected(
    first: Limits, trial: dict[str, float], free: dict[str, float], point: Point
) -> Limits:
    """Correct limits by what a trial with them took."""
    work = trial["compute_seconds"] + trial["host_seconds"]
    in_memory = trial["lookup_seconds"] if point.lookup is None else 0.0
    step = (work + in_memory) / (1 - (point.lookup or 0.0) - point.comm)

    def over(share: float, kind: str) -> float:
        """How many times too long a trial waited."""
        wanted, found, least = share * step, trial[f"{kind}_seconds"], free[f"{kind}_seconds"]
        return min(max((found - least) / max(wanted - least, 1e-3), 0.3), 3.0)

    lookup = 1.0 if point.lookup is None else over(point.lookup, "lookup")
    return Limits(
        first.link_rate * over(point.comm, "comm"),
        None if first.read_rate is None else first.read_rate * lookup,
        first.latency / lookup,
    )


def limited(base: Setting, link: Namespaces | None, found: Limits | None) -> Setting:
    """Slow the link down and return the setting with a slow tier; None is as fast as can be."""
    if link is not None:
        link.set_rate(None if found is None else found.link_rate)
    if found is None:
        return replace(base, read_rate=None, latency=0.0, link_rate=None)
    link_rate = found.link_rate if link is None else None
    return replace(base, read_rate=found.read_rate, latency=found.latency, link_rate=link_rate)


def plain_step(
    base: Setting, link: Namespaces | None, found: Limits | None, repeats: int
) -> dict[str, float]:
    """Measure what a synchronous step computes, sends and reads."""
    setting = replace(limited(base, link, found), variants=((PLAIN, 1),), repeats=repeats)
    return medians(launch(setting, "time", link)["variants"][f"{PLAIN} 1"])


def check(base: Setting, link: Namespaces | None) -> dict[str, Any]:
    """Compare with the plain loop without limits; measure the keys of the batches."""
    found = launch(
        replace(limited(base, link, None), variants=EXACT, items=min(base.items, CHECKED_ITEMS)),
        "check",
        link,
    )
    return found | launch(replace(limited(base, link, None), variants=EXACT), "inflation", link)


def has_torchrec() -> bool:
    """Whether the peer is installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("torchrec", "fbgemm_gpu"))


class Sweep:
    """Every setting on every device, with its calibration."""

    def __init__(self, base: Setting, link: Namespaces | None, quick: bool) -> None:
        self.base, self.link, self.quick = base, link, quick
        self._free: dict[tuple[str, str, int, int], dict[str, float]] = {}

    def on_device(self, setting: Setting, device: str) -> Setting:
        """Return the setting with the compute of a device, as fast as one core is."""
        if device == CORES:
            return setting
        compute = self.free(replace(setting, tier="memory"), CORES)["compute_seconds"]
        return replace(setting, device_seconds=compute / (setting.users * setting.length))

    def free(self, setting: Setting, device: str) -> dict[str, float]:
        """Return what a synchronous step takes when nothing is slow, measured once."""
        known = (setting.tier, device, setting.buffers, setting.topics)
        if known not in self._free:
            placed = self.on_device(setting, device)
            self._free[known] = plain_step(placed, self.link, None, 1 if self.quick else 2)
        return self._free[known]

    def rows(self, title: str, device: str, differences: dict[str, float]) -> list[Row]:
        """Calibrate and measure one setting on one device."""
        point = SWEEP[title]
        base = replace(
            self.base,
            tier="memory" if point.lookup is None else "disk",
            buffers=3 if point.by_latency else 2,
            topics=point.topics if point.topics and not self.quick else self.base.topics,
        )
        note(f"{title}, {device}: how slow link and tier must be")
        free, placed = self.free(base, device), self.on_device(base, device)
        found = limits(free, point)
        if not self.quick:
            trial = plain_step(placed, self.link, found, 1)
            found = corrected(found, trial, free, point)
        variants = point.variants
        if title == TURBO and device == CORES and self.link is not None and has_torchrec():
            variants = (*variants, (PEER, 1))  # an emulated link would not slow it down
        note(f"{title}, {device}: {', '.join(name for name, _ in variants)} in turns")
        setting = replace(limited(placed, self.link, found), variants=variants)
        measured = launch(setting, "time", self.link)
        return rows_of(title, device, measured, differences, tier_is_lane=not point.by_latency)


def sweep(
    base: Setting, link: Namespaces | None, quick: bool
) -> tuple[list[Row], dict[str, float]]:
    """Measure every setting with a slow link and a slow tier."""
    note("whether all schedules arrive at the weights of the plain loop")
    checked, measuring = check(base, link), Sweep(base, link, quick)
    rows: list[Row] = []
    for title, point in SWEEP.items():
        if quick and title not in (PAPER, LATENCY, OVERLAP, TURBO):
            continue
        for device in point.devices:
            rows += measuring.rows(title, device, checked["max_diff"])
    return rows, claims_of(rows, checked["max_diff"], checked["inflation"])


def quick_setting(base: Setting) -> Setting:
    """Make steps small and few: shows that everything runs, measures nothing to quote."""
    small = {"users": 8, "length": 24, "items": 6_000, "topics": 8, "dim": 32, "batches": 8}
    return replace(base, **small, cache_rows=64, repeats=1, steps=2, check_steps=3)  # type: ignore[arg-type]


def run(quick: bool, json_path: Path | None) -> dict[str, Any]:
    """Print the table and the claims; `quick` runs few small steps of some settings."""
    base = quick_setting(FULL) if quick else FULL
    with joined_namespaces() if can_make_namespaces() else nullcontext(None) as link:
        rows, claims = sweep(base, link, quick)
        if not quick:
            unpaced = launch(replace(limited(base, link, None), variants=PAIR), "time", link)
            rows += rows_of("nothing slowed down, table on disk", CORES, unpaced, {})
            claims["nested_speedup_min"] = min(claims["nested_speedup_min"], rows[-1]["speedup"])
    memory = replace(base, tier="memory", variants=PAIR, adaptive=True)
    found = launch(memory, "time", None)
    rows += rows_of("loopback, memory, adaptive", CORES, found, {})
    claims["loopback_overhead"] = 1 / rows[-1]["speedup"] - 1
    for row in rows:
        emulated = "emulated" if link is None else Namespaces.kind
        row["link"] = "loopback" if "loopback" in row["variant"] else emulated
    clusters = cluster_rows(quick)
    claims |= cluster_claims(clusters)
    for row in clusters:
        print(
            " ".join(
                f"{name} {value if isinstance(value, str) else format(value, '.4g')}"
                for name, value in row.items()
                if name != "samples"
            )
        )
    print("\n".join(found["notes"]))
    return finish("pipeline", rows + clusters, claims, json_path)


def cluster_claims(clusters: list[Row]) -> dict[str, float]:
    """Return the headline figures of clustering; MovieLens-1M comes first where it is at hand."""
    zipf = next(row for row in clusters if row["variant"].startswith("Zipf"))
    return {
        "key_inflation": clusters[0]["key_inflation"],
        "key_inflation_random": clusters[0]["key_inflation_random"],
        "key_inflation_zipf": zipf["key_inflation"],
        "key_inflation_zipf_random": zipf["key_inflation_random"],
        "cluster_share_of_step": max(row["share_of_step"] for row in clusters),
    }
