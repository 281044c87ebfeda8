"""Relay-race serving under a P99 SLO: with it, without it, and with one part of it switched off.

Two instances of one thread each, real processes; session traces (serving_trace.py); SLO p99 <= 80 ms at the ranking stage, refusals
count as misses. `slo_qps` is the largest Poisson rate that holds (searched by our own open-loop generator, then put before MLPerf
LoadGen's Server scenario at that rate); `max_prefix` the longest history that holds at a fixed rate. "without" ranks every request
in line, on the same engine, kernels and scheduler. A bundle of random weights: speed does not depend on what a model has learnt.

Real arrivals come from the logs found in the folders of `$SLIPSTREAM_DATA`; without one, synthetic sessions serve and are named so.
"""

import asyncio
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from slipstream.bench import serving_trace
from slipstream.bench.harness import finish
from slipstream.bench.serving_bundle import random_bundle
from slipstream.bench.serving_load import Cascade, Outcome, loadgen_at_hand, loadgen_server, open_loop
from slipstream.bench.serving_plot import draw
from slipstream.bench.serving_trace import Session
from slipstream.bench.serving_worker import Fleet

MODEL: dict[str, Any] = {"kind": "hstu", "dim": 64, "blocks": 2, "heads": 2, "max_len": 6144, "time_buckets": 64}
NUM_ITEMS, FIRST_ID, CANDIDATES = 5_000, 1 << 40, 100
LENGTH = 1280  # behaviours of a long history, two tokens each: about what in-line ranking can bear within the SLO on an idle core
WARM_UP = 3.0
INSTANCES, SLO, STAGES = 2, 0.08, 0.12  # STAGES: retrieval 80 ms + pre-processing 40 ms, as stated in the table
MEMORY = {"device_bytes": 64 << 20, "host_bytes": 800 << 20, "calibrate_seconds": 1.0, "pin_grace": 0.5}

VARIANTS: dict[str, dict[str, Any]] = {
    "relay": {},
    "without": {"relay": False},
    "trigger off": {"trigger": {"enabled": False}},
    "affinity off": {},
    "expander off": {},
    "pre-inference off": {"preinfer": False},
}


class Bench:
    """One fleet, driven through variants and rates."""

    def __init__(self, fleet: Fleet, sessions: list[Session], seconds: float, say: Any) -> None:
        self.fleet, self.sessions, self.seconds, self.say = fleet, sessions, seconds, say
        self.rows: list[dict[str, Any]] = []

    async def run(self, variant: str, rate: float, length: int = LENGTH, loadgen: bool = False, min_requests: int = 200) -> Outcome:
        """One run: fresh instances, a warm-up by the first seconds of the trace that does not count, then the rest. Keeps a row."""
        measured = await self.fleet.configure(MEMORY | VARIANTS[variant], length, expander=variant != "expander off")
        outcome = Outcome(rate)
        affinity = variant not in ("affinity off", "without")
        cascade = Cascade(self.fleet, stages=STAGES, slo=SLO, affinity=affinity, outcome=outcome)
        seconds = min(max(self.seconds, min_requests / rate), 4 * self.seconds)
        requests = serving_trace.replay(self.sessions, rate, 3 * (WARM_UP + seconds), seed=1)  # the same trace for every variant
        requests = serving_trace.poisson(requests, rate, seed=1)
        warm = [request for request in requests if request.at < WARM_UP]
        requests = [replace(request, at=request.at - WARM_UP) for request in requests[len(warm) :]]
        await open_loop(Cascade(self.fleet, stages=STAGES, slo=1.0, affinity=cascade.affinity, outcome=Outcome(rate)), warm)
        before = await self.fleet.stats()
        if loadgen:
            with tempfile.TemporaryDirectory() as folder:
                await loadgen_server(cascade, requests, rate, seconds, Path(folder))
        else:
            await open_loop(cascade, [request for request in requests if request.at < seconds])
        after = await self.fleet.stats()
        row = self._row(variant, length, outcome, {name: after[name] - before.get(name, 0.0) for name in after}, measured)
        row["score_diff"] = await self.fleet.score_diff()
        self.rows.append(row)
        self.say(
            f"{variant:>18} {rate:6.1f}/s {length:5d} behaviours: p99 {row['p99_ms']:7.1f} ms, within SLO {row['within_slo']:.3f} "
            f"{row['hits']} {outcome.verdict or ''}"
        )
        return outcome

    def _row(
        self, variant: str, length: int, outcome: Outcome, change: dict[str, float], measured: dict[str, Any]
    ) -> dict[str, Any]:
        hits = outcome.hits
        refused = {name.removeprefix("refused_"): int(n) for name, n in change.items() if name.startswith("refused_") and n}
        return {
            "variant": variant,
            "load": "LoadGen" if outcome.verdict else "own",
            "rate": outcome.offered,
            "length": length,
            "requests": len(outcome.latencies),
            "p50_ms": outcome.percentile(0.5),
            "p99_ms": outcome.percentile(0.99),
            "within_slo": outcome.goodput(SLO),
            "verdict": outcome.verdict or ("holds" if outcome.percentile(0.99) <= 1e3 * SLO else "misses"),
            "hits": "/".join(str(hits[name]) for name in ("device", "host", "joined", "extended", "inline")),
            "wasted": int(change.get("wasted", 0)),
            "late": int(change.get("late", 0)),
            "samples": {
                "latencies_ms": [round(1e3 * latency, 3) if np.isfinite(latency) else None for latency in outcome.latencies],
                "refused": refused,
                "errors": dict(outcome.errors),
                "predicted_ms": {name: measured[name] for name in ("inline_ms", "hit_ms")},
                "instances": change,
            },
        }

    async def largest_rate(self, variant: str, low: float, high: float, probes: int) -> float:
        """Bisection, in steps of ratio, of the rate that still holds; 0 where none that was tried does."""
        best = 0.0
        for _ in range(probes):
            middle = (low * high) ** 0.5
            if holds(await self.run(variant, middle)):
                best = low = middle
            else:
                high = middle
        return best

    async def longest_prefix(self, variant: str, rate: float, low: int, high: int, probes: int) -> int:
        """The same for the length of the history at a fixed rate."""
        best = 0
        for _ in range(probes):
            middle = int(round((low * high) ** 0.5 / 32) * 32)
            if holds(await self.run(variant, rate, middle, min_requests=120)):
                best, low = middle, middle
            else:
                high = middle
        return best


def holds(outcome: Outcome) -> bool:
    """Whether the 99th percentile kept the SLO, misses included."""
    return outcome.percentile(0.99) <= 1e3 * SLO


def noise_floor(seconds: float = 1.0) -> float:
    """How late this machine wakes an idle process that asked for a millisecond: 99th percentile, in milliseconds."""
    late, end = [], time.perf_counter() + seconds
    while (begin := time.perf_counter()) < end:
        time.sleep(0.001)
        late.append(time.perf_counter() - begin - 0.001)
    return 1e3 * float(np.quantile(late, 0.99))


async def _measure(quick: bool, bundle: Path, sessions: list[Session], say: Any) -> tuple[list[dict[str, Any]], dict[str, float]]:
    async with Fleet(INSTANCES, bundle, CANDIDATES, FIRST_ID, NUM_ITEMS) as fleet:
        bench = Bench(fleet, sessions, 4.0 if quick else 10.0, say)
        measured = await fleet.configure(MEMORY, LENGTH, expander=True)
        capacity = INSTANCES * 1e3 / measured["inline_ms"]  # requests a second that would keep all instances busy in line
        probes = 2 if quick else 4
        without = await bench.largest_rate("without", 0.02 * capacity, 0.5 * capacity, probes)
        relay = await bench.largest_rate("relay", 0.3 * capacity, 2.0 * capacity, probes)
        for variant in ("trigger off", "affinity off", "expander off", "pre-inference off"):
            await bench.run(variant, max(relay, 0.5 * capacity))
        for variant, rate in (("relay", relay), ("without", without)):
            if not quick and rate and loadgen_at_hand():
                await bench.run(variant, rate, loadgen=True, min_requests=500)
        if not loadgen_at_hand():
            say("MLPerf LoadGen is not installed (package mlcommons-loadgen): its verdicts are left out")
        rate = 0.15 * capacity
        lengths = [await bench.longest_prefix(v, rate, LENGTH // 2, 4 * LENGTH, probes) for v in ("relay", "without")]
    claims = {
        "slo_qps_ratio": relay / without if without else float("inf"),
        "max_prefix_ratio": lengths[0] / lengths[1] if lengths[1] else float("inf"),
        "score_diff": max(row["score_diff"] for row in bench.rows),
        "noise_floor_ms": noise_floor(),
        "slo_qps_relay": relay,
        "slo_qps_without": without,
        "max_prefix_relay": float(lengths[0]),
        "max_prefix_without": float(lengths[1]),
    }
    return bench.rows, claims


def run(quick: bool = False, json_path: Path | None = None) -> dict[str, Any]:
    """Measure, print the table, draw the curves beside the JSON."""
    console = Console(highlight=False)
    found = serving_trace.real_sessions()
    name, sessions = found if found is not None else ("synthetic sessions", serving_trace.synthetic_sessions())
    pages = float(np.mean([len(session.pages) for session in sessions]))
    console.print(
        f"{INSTANCES} instances of one thread; HSTU {MODEL['dim']} wide, {MODEL['blocks']} layers; {LENGTH} behaviours "
        f"({serving_trace.SHORT_SHARE:.0%} of users {serving_trace.SHORT_LENGTH}), {CANDIDATES} candidates; ranking begins "
        f"{1e3 * STAGES:.0f} ms after arrival, SLO {1e3 * SLO:.0f} ms; {name}: {len(sessions):,} sessions of {pages:.1f} pages"
    )
    console.print("hits are device/host/joined/extended/inline", style="dim")
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "bundle"
        random_bundle(bundle, MODEL, num_items=NUM_ITEMS, first_id=FIRST_ID)
        rows, claims = asyncio.run(_measure(quick, bundle, sessions, console.print))
    if json_path is not None:
        draw(rows, json_path.with_suffix(".png"), SLO)
    return finish("serving", rows, claims, json_path)
