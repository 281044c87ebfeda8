"""What each schedule hides: two ranks with a table on a slow disk, joined by a slow link.

First a calibration without limits: what a serial step computes, sends and reads. Then, for
each setting of the sweep, the rates of link and disk are set so that lookup and communication would
take the wanted shares of the serial step; reads wait without using the cores that compute. The
table's own cache is smaller than a batch, as device memory is in NestPipe: the buffers are the
cache. Variants take turns in one run; shares are measured, not assumed. `max_diff` is against the
serial schedule after a few steps: with the same cut (bit for bit) and whole (rounding). The
last setting is loopback with tables in memory, where nothing can be hidden and the schedule must
cost nothing; there `nested` chooses its own number of micro-batches.
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
from benchmarks.pipeline.link import Namespaces, can_make_namespaces, joined_namespaces
from benchmarks.pipeline.rank import PEER, Setting
from slipstream.bench.harness import Row, finish, median, note

Variants = tuple[tuple[str, int], ...]
PAIR: Variants = (("serial", 1), ("nested", 8))
EXACT: Variants = (*PAIR, ("dual_buffer", 1), ("frozen_window", 8))
STALE: Variants = (("semi_async", 1), ("six_stage", 1))
PAPER, TURBO = "NestPipe at 1,536 workers", "TurboGR's ratio"


@dataclass(frozen=True)
class Point:
    """Shares of lookup and communication in the serial step, and the variants compared."""

    lookup: float | None  # None: tables in memory, as TurboGR's are
    comm: float
    variants: Variants


SWEEP = {
    PAPER: Point(0.496, 0.205, (*EXACT, ("semi_async", 1))),
    "NestPipe at 128 workers": Point(0.244, 0.092, PAIR),
    TURBO: Point(None, 0.25, (*PAIR, *STALE)),
}


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


def medians(samples: list[dict[str, float]]) -> dict[str, float]:
    return {name: median([one[name] for one in samples]) for name in samples[0]}


def limits(
    free: dict[str, float], lookup_share: float | None, comm_share: float
) -> tuple[float, float | None]:
    """Compute link bytes and rows read per second that give a free step the wanted shares."""
    compute = free["step_seconds"] * free["compute_utilisation"]
    if lookup_share is None:
        step = (compute + free["lookup_seconds"]) / (1 - comm_share)
        return free["sent_bytes"] / max(comm_share * step - free["comm_seconds"], 1e-4), None
    step = compute / (1 - lookup_share - comm_share)
    comm = max(comm_share * step - free["comm_seconds"], 1e-4)
    lookup = max(lookup_share * step - free["lookup_seconds"], 1e-4)
    return free["sent_bytes"] / comm, max(free["reads"], 1.0) / lookup


def rows_of(title: str, found: dict[str, Any], differences: dict[str, float]) -> list[Row]:
    """One row per variant of a setting."""
    plain = medians(found["variants"]["serial 1"])
    rows = []
    for variant, samples in found["variants"].items():
        one = medians(samples)
        row: Row = {"variant": f"{title}: {variant}", "step_ms": 1e3 * one["step_seconds"]}
        row["speedup"] = plain["step_seconds"] / one["step_seconds"]
        one = dict.fromkeys(plain, float("nan")) | one  # a peer tells its time alone
        row["lookup"] = one["exposed_lookup"]
        row["comm"], row["sparse_comm"] = one["exposed_comm"], one["exposed_sparse_comm"]
        # Against what the serial step communicates: a cut sends more, which must not flatter
        # the share.
        row["comm_share"] = (
            one["exposed_comm"] * one["step_seconds"] / max(plain["comm_seconds"], 1e-9)
        )
        row["compute"] = one["compute_utilisation"]
        row["cpu_ms"], row["reads"], row["sent_mb"] = (
            1e3 * one["cpu_seconds"],
            one["reads"],
            one["sent_bytes"] / 1e6,
        )
        row["diff_same_cut"] = differences.get(f"{variant} same_cut", float("nan"))
        row["diff_whole"] = differences.get(f"{variant} whole", float("nan"))
        row["samples"] = samples
        rows.append(row)
    return rows


def calibrate(
    base: Setting,
    link: Namespaces | None,
    point: Point,
    free: dict[str, float],
    *,
    trying: bool = True,
) -> Setting:
    """Find rates that give the serial step the wanted shares, corrected once by a trial."""
    link_rate, read_rate = limits(free, point.lookup, point.comm)
    trial = (
        free_step(replace(base, read_rate=read_rate, repeats=1), link, link_rate)
        if trying
        else free
    )
    lookup = trial["lookup_seconds"] if point.lookup is None else 0.0
    step = (trial["step_seconds"] * trial["compute_utilisation"] + lookup) / (
        1 - (point.lookup or 0.0) - point.comm
    )

    def correction(share: float, kind: str) -> float:
        wanted, found, least = share * step, trial[f"{kind}_seconds"], free[f"{kind}_seconds"]
        if not trying:
            return 1.0
        return min(max((found - least) / max(wanted - least, 1e-3), 0.3), 3.0)

    link_rate *= correction(point.comm, "comm")
    if read_rate is not None and point.lookup is not None:
        read_rate *= correction(point.lookup, "lookup")
    if link is not None:
        link.set_rate(link_rate)
    return replace(base, read_rate=read_rate, link_rate=link_rate if link is None else None)


def free_step(
    base: Setting, link: Namespaces | None, link_rate: float | None = None
) -> dict[str, float]:
    """Measure what a serial step computes, sends and reads, by default without limits."""
    if link is not None:
        link.set_rate(link_rate)
    setting = replace(
        base, variants=(("serial", 1),), link_rate=link_rate if link is None else None
    )
    return medians(launch(setting, "time", link)["variants"]["serial 1"])


def check(base: Setting, link: Namespaces | None, parts: str) -> dict[str, Any]:
    """Compare with the serial schedule without limits; measure the keys of the batches."""
    if link is not None:
        link.set_rate(None)
    return launch(replace(base, variants=EXACT), parts, link)


def has_torchrec() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("torchrec", "fbgemm_gpu"))


def sweep(
    base: Setting, link: Namespaces | None, quick: bool
) -> tuple[list[Row], dict[str, float]]:
    """Measure every setting with a slow link and a paced disk."""
    note(
        "what a step takes when nothing is slow, and whether all schedules arrive at the same "
        "weights"
    )
    checked = check(base, link, "check inflation time" if quick else "check inflation")
    if quick:
        free = dict.fromkeys(("disk", "memory"), medians(checked["variants"]["serial 1"]))
    else:
        free = {
            tier: free_step(replace(base, tier=tier, repeats=2), link)
            for tier in ("disk", "memory")
        }
    rows: list[Row] = []
    for title, point in SWEEP.items():
        if quick and title not in (PAPER, TURBO):
            continue
        tier = "memory" if point.lookup is None else "disk"
        note(f"{title}: setting the rates of link and disk")
        setting = calibrate(replace(base, tier=tier), link, point, free[tier], trying=not quick)
        variants = point.variants
        if (
            title == TURBO and link is not None and has_torchrec()
        ):  # an emulated link would not slow it down
            variants = (*variants, (PEER, 1))
        note(f"{title}: {', '.join(name for name, _ in variants)} in turns")
        rows += rows_of(
            title, launch(replace(setting, variants=variants), "time", link), checked["max_diff"]
        )
    return rows, claims_of(rows, checked["max_diff"], checked["inflation"])


def claims_of(
    rows: list[Row], differences: dict[str, float], inflation: dict[str, float]
) -> dict[str, float]:
    """Return the headline figures."""

    def row_at(title: str, variant: str) -> Row:
        return next(row for row in rows if row["variant"] == f"{title}: {variant}")

    nested, plain = row_at(PAPER, "nested 8"), row_at(PAPER, "serial 1")
    exact = [value for name, value in differences.items() if name.endswith("same_cut")]
    return {
        "nested_speedup": nested["speedup"],
        "nested_speedup_min": min(
            row["speedup"] for row in rows if row["variant"].endswith("nested 8")
        ),
        "exposed_lookup": nested["lookup"],
        "exposed_comm_share": nested["comm_share"],
        "nested_utilisation": nested["compute"],
        "compute_utilisation": row_at(TURBO, "six_stage 1")["compute"],
        "semi_async_exposed": row_at(TURBO, "semi_async 1")["sparse_comm"],
        "serial_comm_share_turbo": row_at(TURBO, "serial 1")["comm"],
        "max_diff": max(exact),
        "max_diff_whole": differences["nested 8 whole"],
        "serial_lookup_share": plain["lookup"],
        "serial_comm_share": plain["comm"],
        "batch_overlap": inflation["overlap"],
        "key_inflation_bench": inflation["clustered"],
        "key_inflation_bench_random": inflation["random"],
    }


def quick_setting(base: Setting) -> Setting:
    """Make steps small and few: shows that everything runs, measures nothing to quote."""
    small = {
        "users": 8,
        "length": 24,
        "items": 6_000,
        "topics": 8,
        "dim": 32,
        "blocks": 1,
        "cache_rows": 64,
    }
    return replace(base, **small, repeats=1, steps=2, check_steps=3)  # type: ignore[arg-type]


def run(quick: bool, json_path: Path | None) -> dict[str, Any]:
    """Print the table and the claims; `quick` runs few small steps of the paper's setting only."""
    base = quick_setting(Setting()) if quick else Setting()
    with joined_namespaces() if can_make_namespaces() else nullcontext(None) as link:
        rows, claims = sweep(base, link, quick)
        if link is not None:
            link.set_rate(None)
        if not quick:
            unpaced = launch(replace(base, variants=PAIR), "time", link)
            rows += rows_of("disk without pacing, free link", unpaced, {})
            claims["nested_speedup_min"] = min(claims["nested_speedup_min"], rows[-1]["speedup"])
    memory = replace(base, tier="memory", variants=PAIR, adaptive=True)
    found = launch(memory, "time", None)
    rows += rows_of("loopback, memory, adaptive", found, {})
    claims["loopback_overhead"] = 1 / rows[-1]["speedup"] - 1
    for row in rows:
        row["link"] = (
            "loopback"
            if "loopback" in row["variant"]
            else "emulated"
            if link is None
            else Namespaces.kind
        )
    clusters = cluster_rows(quick)
    real = clusters[0]  # MovieLens-1M where it is at hand
    claims |= {
        "key_inflation": real["key_inflation"],
        "key_inflation_random": real["key_inflation_random"],
    }
    zipf = next(row for row in clusters if row["variant"].startswith("Zipf"))
    claims |= {
        "key_inflation_zipf": zipf["key_inflation"],
        "key_inflation_zipf_random": zipf["key_inflation_random"],
    }
    claims["cluster_share_of_step"] = max(row["share_of_step"] for row in clusters)
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
