"""Serving under a p99 limit: with pre-inference, without it, and with one part switched off.

Two instances of one thread each, real processes; session traces (trace.py); SLO p99 <= 80 ms at the
ranking stage, refusals count as misses. The length of the history depends on the machine: the
longest whose in-line ranking, measured at the start on all instances at once, takes 55 % of the
SLO. That is about the longest history that a system without pre-inference holds at a low rate. A
shorter one (40 %) is measured too.

`slo_qps` is the largest Poisson rate that holds: the same bisection for both variants with our own
open-loop generator over the same trace, then MLPerf LoadGen's Server scenario at that rate (or the
next lower one it calls VALID). `max_prefix` is the longest history that holds at a fixed rate.
"without" ranks every request in line, on the same engine, kernels and scheduler, where the least
work waits. The bundle has random weights: speed does not depend on what a model has learnt.

Real arrivals come from logs in the folders of `$SLIPSTREAM_DATA`; without one, sessions are
synthetic and named so.
"""

import asyncio
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.serving import trace as serving_trace
from benchmarks.serving.bundle import random_bundle
from benchmarks.serving.load import LOADGEN_RUNS, loadgen_at_hand
from benchmarks.serving.plot import draw
from benchmarks.serving.search import Bench, Setting, length_of_time
from benchmarks.serving.trace import Session
from benchmarks.serving.worker import Fleet
from slipstream.bench.harness import finish
from slipstream.interrupts import terminated_as_interrupted

MODEL: dict[str, Any] = {
    "kind": "hstu",
    "dim": 64,
    "blocks": 2,
    "heads": 2,
    "max_len": 6144,
    "time_buckets": 64,
}
NUM_ITEMS, FIRST_ID, CANDIDATES = 5_000, 1 << 40, 100
INSTANCES, SLO, STAGES = (
    2,
    0.08,
    0.12,
)  # STAGES: retrieval 80 ms + pre-processing 40 ms, as stated in the table
INLINE_SHARE, SHORTER_SHARE = (
    0.55,
    0.4,
)  # of the SLO: what ranking the long history in line takes, and the shorter one
LOW_LOAD = 0.1  # rates are searched from this share of what the instances could rank in line
FIXED_LOAD = 0.3  # max_prefix is measured at this share of what the instances could rank in line
MEMORY = {
    "device_bytes": 64 << 20,
    "host_bytes": 400 << 20,
    "calibrate_seconds": 1.0,
    "pin_grace": 0.5,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "relay": {},
    "without": {"relay": False},
    "trigger off": {"trigger": {"enabled": False}},
    "affinity off": {},
    "expander off": {},
    "pre-inference off": {"preinfer": False},
}
ABLATIONS = ("trigger off", "affinity off", "expander off", "pre-inference off")
FULL = Setting(SLO, STAGES, requests=400, most_seconds=24.0, memory=MEMORY, variants=VARIANTS)
QUICK = Setting(SLO, STAGES, requests=200, most_seconds=10.0, memory=MEMORY, variants=VARIANTS)


def noise_floor(seconds: float = 1.0) -> float:
    """Return how late this machine wakes a process that sleeps 1 ms: p99 in milliseconds."""
    late, end = [], time.perf_counter() + seconds
    while (begin := time.perf_counter()) < end:
        time.sleep(0.001)
        late.append(time.perf_counter() - begin - 0.001)
    return 1e3 * float(np.quantile(late, 0.99))


async def _measure(
    quick: bool, bundle: Path, sessions: list[Session], log: Any
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    floor, probes = noise_floor(), 2 if quick else 5
    async with Fleet(INSTANCES, bundle, CANDIDATES, FIRST_ID, NUM_ITEMS) as fleet:
        await fleet.configure(MEMORY | VARIANTS["without"], 256, expander=False)
        length, inline_ms = await length_of_time(
            fleet, 1e3 * INLINE_SHARE * SLO, 64, MODEL["max_len"] // 2
        )
        # Long histories a second that keep all instances busy in line.
        capacity = INSTANCES * 1e3 / inline_ms
        shorter, shorter_ms = await length_of_time(fleet, 1e3 * SHORTER_SHARE * SLO, 64, length)
        log(
            f"{length} behaviours rank in line in {inline_ms:.1f} ms, {shorter} in "
            f"{shorter_ms:.1f} ms; noise floor {floor:.2f} ms"
        )
        bench = Bench(fleet, sessions, QUICK if quick else FULL, length, log)
        own = await bench.largest_rates(
            ("relay", "without"), LOW_LOAD * capacity, 1.5 * capacity, probes
        )
        validated = {}
        if loadgen_at_hand() and not quick:
            validated = {
                variant: await bench.valid_rate(variant, rate) for variant, rate in own.items()
            }
        elif not loadgen_at_hand():
            log(
                "MLPerf LoadGen is not installed (package mlcommons-loadgen): its verdicts are "
                "left out"
            )
        valid = bool(validated) and all(validated.values())
        rates = validated if valid else own
        rate = FIXED_LOAD * capacity
        longest = min(2.4 * length, MODEL["max_len"])
        lengths = await bench.longest_prefixes(
            ("relay", "without"), rate, 0.6 * length, longest, min(4, probes)
        )
        for variant in ABLATIONS:
            await bench.run(variant, rates["relay"] or 0.5 * capacity)
        brief = await bench.largest_rates(
            ("relay", "without"), LOW_LOAD * capacity, 2 * capacity, min(4, probes), shorter
        )
    return bench.rows, {
        "slo_qps_ratio": rates["relay"] / rates["without"] if rates["without"] else float("inf"),
        "max_prefix_ratio": lengths["relay"] / lengths["without"]
        if lengths["without"]
        else float("inf"),
        "score_diff": max(row["score_diff"] for row in bench.rows),
        "noise_floor_ms": floor,
        # 0: LoadGen did not call both VALID, so the rates are those of our own generator.
        "loadgen_valid": float(valid),
        "slo_qps_relay": rates["relay"],
        "slo_qps_without": rates["without"],
        "slo_qps_ratio_own": own["relay"] / own["without"] if own["without"] else float("inf"),
        "slo_qps_ratio_shorter": brief["relay"] / brief["without"]
        if brief["without"]
        else float("inf"),
        "length_shorter": float(shorter),
        "max_prefix_relay": float(lengths["relay"]),
        "max_prefix_without": float(lengths["without"]),
        "max_prefix_rate": rate,
        "length": float(length),
        "inline_ms": inline_ms,
    }


def run(quick: bool = False, json_path: Path | None = None) -> dict[str, Any]:
    """Measure, print the table, draw the curves next to the JSON."""
    console = Console(highlight=False)
    found = serving_trace.real_sessions()
    name, sessions = (
        found if found is not None else ("synthetic sessions", serving_trace.synthetic_sessions())
    )
    pages = float(np.mean([len(session.pages) for session in sessions]))
    setting = QUICK if quick else FULL
    console.print(
        f"{INSTANCES} instances of one thread; HSTU {MODEL['dim']} wide, {MODEL['blocks']} "
        "layers, two tokens a behaviour; "
        f"{serving_trace.SHORT_SHARE:.0%} of users with {serving_trace.SHORT_LENGTH} behaviours; "
        f"{CANDIDATES} candidates; ranking "
        f"begins {1e3 * STAGES:.0f} ms after arrival, SLO {1e3 * SLO:.0f} ms; {setting.requests} "
        "requests a run (LoadGen "
        f"{setting.loadgen_requests}); {name}: {len(sessions):,} sessions of {pages:.1f} pages"
    )
    console.print("hits are device/host/joined/extended/inline", style="dim")
    with tempfile.TemporaryDirectory() as folder, terminated_as_interrupted():
        bundle = Path(folder) / "bundle"
        random_bundle(bundle, MODEL, num_items=NUM_ITEMS, first_id=FIRST_ID)
        try:
            rows, claims = asyncio.run(_measure(quick, bundle, sessions, console.print))
        except KeyboardInterrupt:
            if LOADGEN_RUNS.is_set():  # its thread would call into an interpreter that is gone
                shutil.rmtree(folder, ignore_errors=True)
                os._exit(130)
            raise
    if json_path is not None:
        draw(rows, json_path.with_suffix(".png"), SLO)
    return finish("serving", rows, claims, json_path)
