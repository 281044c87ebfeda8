"""What nested pipelining hides: two ranks with a table on a slow disk tier, joined by a slow link, under every schedule.

First a calibration without limits: what a synchronous step computes, sends and reads. Then, for each setting of the sweep, the
link's and the disk's rates are set so that lookup and communication would take the wanted shares of the synchronous step; reads
wait instead of burning the cores that compute. The tier's own cache is smaller than a batch, as device memory is in NestPipe: the
buffers are the cache. Variants take turns in one run; shares are measured, not assumed. `max_diff` is against the synchronous
schedule after a few steps: with the same cut (bit for bit) and whole (rounding). The last setting is loopback with tables in
memory, where nothing can be hidden and the schedule must cost nothing; there `nested` chooses its own number of micro-batches.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from slipstream.bench.harness import Row, finish, median
from slipstream.bench.pipeline_clusters import cluster_rows
from slipstream.bench.pipeline_link import Namespaces, can_make_namespaces, two_namespaces
from slipstream.bench.pipeline_rank import WORLD, Setting

PAIR = (("synchronous", 1), ("nested", 8))
PARTS = (("synchronous", 1), ("dual_buffer", 1), ("frozen_window", 8), ("semi_async", 1))
PAPER = "NestPipe at 1,536 workers"
# Shares of lookup and communication in the synchronous step.
SWEEP = {PAPER: (0.496, 0.205), "NestPipe at 128 workers": (0.244, 0.092), "TurboGR's ratio, no lookup": (0.02, 0.25)}


def launch(setting: Setting, wanted: str, link: Namespaces | None) -> dict[str, Any]:
    """Start the ranks, wait for them within the time allowed, never leave one behind."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    with tempfile.TemporaryDirectory(prefix="slipstream-pipeline-") as scratch:
        told = [scratch, json.dumps(asdict(setting)), wanted]
        children = []
        for rank in range(WORLD):
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback}
            environment |= link.environment(rank) if link is not None else {}
            command = [*(link.command(rank) if link is not None else []), sys.executable, "-m", "slipstream.bench.pipeline_rank"]
            children.append(
                subprocess.Popen(
                    [*command, str(rank), *told], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                )
            )
        deadline = time.monotonic() + setting.seconds_allowed
        try:
            spoken = [child.communicate(timeout=max(1.0, deadline - time.monotonic())) for child in children]
        finally:
            for child in children:
                if child.poll() is None:
                    child.kill()
                    child.wait()
    for number, (child, (_, complaint)) in enumerate(zip(children, spoken, strict=True)):
        if child.returncode != 0:
            raise RuntimeError(f"rank {number} of the pipeline benchmark failed: {complaint.strip()[-3000:]}")
    return json.loads(spoken[0][0].strip().splitlines()[-1])


def medians(samples: list[dict[str, float]]) -> dict[str, float]:
    return {name: median([one[name] for one in samples]) for name in samples[0]}


def limits(free: dict[str, float], lookup_share: float, comm_share: float) -> tuple[float, float]:
    """(link bytes per second, rows read per second) that stretch a free step to the wanted shares."""
    compute = free["step_seconds"] * free["compute_utilisation"]
    step = compute / (1 - lookup_share - comm_share)
    comm = max(comm_share * step - free["comm_seconds"], 1e-4)
    lookup = max(lookup_share * step - free["lookup_seconds"], 1e-4)
    return free["sent_bytes"] / comm, max(free["reads"], 1.0) / lookup


def rows_of(title: str, found: dict[str, Any], differences: dict[str, float]) -> list[Row]:
    """One row per variant of a setting."""
    plain = medians(found["variants"]["synchronous 1"])
    rows = []
    for variant, samples in found["variants"].items():
        one = medians(samples)
        row: Row = {"variant": f"{title}: {variant}", "step_ms": 1e3 * one["step_seconds"]}
        row["speedup"] = plain["step_seconds"] / one["step_seconds"]
        row["lookup"] = one["exposed_lookup"]
        row["comm"] = one["exposed_comm"]
        # Against what the synchronous step communicates: a cut sends more, which must not flatter the share.
        row["comm_share"] = one["exposed_comm"] * one["step_seconds"] / max(plain["comm_seconds"], 1e-9)
        row["compute"] = one["compute_utilisation"]
        row["reads"], row["sent_mb"] = one["reads"], one["sent_bytes"] / 1e6
        row["diff_same_cut"] = differences.get(f"{variant} same_cut", float("nan"))
        row["diff_whole"] = differences.get(f"{variant} whole", float("nan"))
        row["samples"] = samples
        rows.append(row)
    return rows


def calibrate(base: Setting, link: Namespaces | None, shares: tuple[float, float], free: dict[str, float]) -> Setting:
    """The setting whose synchronous step has the wanted shares: rates from the free step, corrected once by a trial."""
    link_rate, read_rate = limits(free, *shares)
    for corrected in (False, True):
        if link is not None:
            link.set_rate(link_rate)
        setting = replace(base, read_rate=read_rate, link_rate=link_rate if link is None else None)
        if corrected:
            break
        trial = medians(
            launch(replace(setting, variants=(("synchronous", 1),), repeats=1), "time", link)["variants"]["synchronous 1"]
        )
        step = trial["step_seconds"] * trial["compute_utilisation"] / (1 - sum(shares))
        for share, kind in zip(shares, ("lookup", "comm"), strict=True):
            wanted, found, least = share * step, trial[f"{kind}_seconds"], free[f"{kind}_seconds"]
            factor = min(max((found - least) / max(wanted - least, 1e-3), 0.3), 3.0)
            if kind == "lookup":
                read_rate *= factor
            else:
                link_rate *= factor
    return setting


def free_step(base: Setting, link: Namespaces | None) -> dict[str, float]:
    """What a synchronous step computes, sends and reads when nothing is slowed down."""
    if link is not None:
        link.set_rate(None)
    return medians(launch(replace(base, variants=(("synchronous", 1),), repeats=2), "time", link)["variants"]["synchronous 1"])


def check(base: Setting, link: Namespaces | None) -> dict[str, Any]:
    """Differences from the synchronous schedule, and the keys of the batches."""
    if link is not None:
        link.set_rate(None)
    return launch(replace(base, variants=tuple(dict.fromkeys(PAIR + PARTS))), "check inflation", link)


def sweep(base: Setting, link: Namespaces | None, quick: bool) -> tuple[list[Row], dict[str, float]]:
    """Every setting with a slow link and a paced disk."""
    free, checked = free_step(base, link), check(base, link)
    rows: list[Row] = []
    for title, shares in SWEEP.items():
        if quick and title != PAPER:
            continue
        setting = calibrate(base, link, shares, free)
        for variants in (PAIR, PARTS) if title == PAPER else (PAIR,):
            found = launch(replace(setting, variants=variants), "time", link)
            new = rows_of(title, found, checked["max_diff"])
            rows += new if variants == PAIR else new[1:]
    return rows, claims_of(rows, checked["max_diff"], checked["inflation"])


def claims_of(rows: list[Row], differences: dict[str, float], inflation: dict[str, float]) -> dict[str, float]:
    """The headline figures, by the names of the measures."""

    def at_paper(variant: str) -> Row:
        return next(row for row in rows if row["variant"] == f"{PAPER}: {variant}")

    nested, stale = at_paper("nested 8"), at_paper("semi_async 1")
    plain = at_paper("synchronous 1")
    exact = [value for name, value in differences.items() if name.endswith("same_cut") and not name.startswith("semi_async")]
    return {
        "nested_speedup": nested["speedup"],
        "nested_speedup_min": min(row["speedup"] for row in rows if row["variant"].endswith("nested 8")),
        "exposed_lookup": nested["lookup"],
        "exposed_comm_share": nested["comm_share"],
        "compute_utilisation": nested["compute"],
        "semi_async_exposed": stale["comm"],
        "max_diff": max(exact),
        "max_diff_whole": differences["nested 8 whole"],
        "synchronous_lookup_share": plain["lookup"],
        "synchronous_comm_share": plain["comm"],
        "batch_overlap": inflation["overlap"],
        "key_inflation_bench": inflation["clustered"],
        "key_inflation_bench_random": inflation["random"],
    }


def quick_setting(base: Setting) -> Setting:
    """Small steps, few of them: shows that everything runs, measures nothing worth quoting."""
    small = {"users": 8, "length": 24, "items": 6_000, "topics": 8, "dim": 32, "blocks": 1, "cache_rows": 64}
    return replace(base, **small, repeats=1, steps=2, check_steps=3)  # type: ignore[arg-type]


def run(quick: bool, json_path: Path | None) -> dict[str, Any]:
    """Print the table and the claims; `quick` runs few small steps of the paper's setting only."""
    base = quick_setting(Setting()) if quick else Setting()
    with two_namespaces() if can_make_namespaces() else nullcontext(None) as link:
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
        row["link"] = "loopback" if "loopback" in row["variant"] else "emulated" if link is None else Namespaces.kind
    clusters = cluster_rows(quick)
    real = clusters[0]  # MovieLens-1M where it is at hand
    claims |= {"key_inflation": real["key_inflation"], "key_inflation_random": real["key_inflation_random"]}
    for row in clusters:
        print(
            " ".join(
                f"{name} {value if isinstance(value, str) else format(value, '.4g')}"
                for name, value in row.items()
                if name != "samples"
            )
        )
    print("\n".join(found["said"]))
    return finish("pipeline", rows + clusters, claims, json_path)
