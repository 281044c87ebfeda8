"""One fleet driven through variants, rates and lengths: a run and its row, and the search for the largest that holds the SLO.

Every run of a variant gets fresh instances and the same trace. Its length is a number of requests, not of seconds, because that is
what a 99th percentile needs: of `requests` a hundredth may miss. A run that has missed more is ended there, its verdict being certain.
"""

import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.bench import serving_trace
from slipstream.bench.serving_load import Cascade, Outcome, Route, loadgen_server, open_loop
from slipstream.bench.serving_trace import Histories, Session
from slipstream.bench.serving_worker import Fleet

WARM_UP = 3.0  # seconds of the trace before what counts
HITS = ("device", "host", "joined", "extended", "inline")


@dataclass(frozen=True)
class Setting:
    """What every run of a benchmark shares."""

    slo: float  # seconds of the ranking stage, 99th percentile
    stages: float  # seconds from arrival to ranking
    requests: int  # of one run
    most_seconds: float  # a run at a low rate ends here, with fewer requests
    memory: dict[str, Any]
    variants: dict[str, dict[str, Any]]
    loadgen_requests: int = 1000


@dataclass
class Bench:
    """See the module."""

    fleet: Fleet
    sessions: list[Session]
    setting: Setting
    length: int
    say: Callable[[str], None]
    rows: list[dict[str, Any]] = field(default_factory=list)

    async def run(self, variant: str, rate: float, length: int | None = None, *, loadgen: bool = False) -> Outcome:
        """One run: fresh instances, a warm-up by the first seconds of the trace that does not count, then the rest. Keeps a row."""
        setting, length = self.setting, self.length if length is None else length
        config = setting.memory | setting.variants[variant]
        measured = await self.fleet.configure(config, length, expander=variant != "expander off")
        outcome = Outcome(rate, setting.slo)
        wanted = setting.loadgen_requests if loadgen else setting.requests
        seconds = min(wanted / rate, (3 if loadgen else 1) * setting.most_seconds)
        # The same trace for every variant at this rate; LoadGen makes its own times and may ask for somewhat more.
        requests = serving_trace.replay(self.sessions, rate, (3 if loadgen else 1.3) * (WARM_UP + seconds), seed=1)
        requests = serving_trace.poisson(requests, rate, seed=1)
        warm = [request for request in requests if request.at < WARM_UP]
        requests = [replace(request, at=request.at - WARM_UP) for request in requests[len(warm) :]]
        await open_loop(self._cascade(variant, length, Outcome(rate), 1.0), warm)
        before = await self.fleet.stats()
        cascade = self._cascade(variant, length, outcome, setting.slo)
        if loadgen:
            with tempfile.TemporaryDirectory() as folder:
                await loadgen_server(cascade, requests, rate, seconds, Path(folder))
        else:
            await open_loop(cascade, [request for request in requests if request.at < seconds], give_up=True)
        after = await self.fleet.stats()
        change = {name: after[name] - before.get(name, 0.0) for name in after}
        row = _row(variant, length, outcome, change, measured) | {"score_diff": await self.fleet.score_diff()}
        self.rows.append(row)
        self.say(
            f"{variant:>18} {rate:6.1f}/s {length:5d} behaviours: {row['requests']:4d} requests, p99 {row['p99_ms']:6.1f} ms, within "
            f"SLO {row['within_slo']:.3f}, hits {row['hits']}, wasted {row['wasted']}, late {row['late']}  {row['verdict']}"
        )
        return outcome

    def _cascade(self, variant: str, length: int, outcome: Outcome, slo: float) -> Cascade:
        routes: dict[str, Route] = {"affinity off": "random", "without": "least work"}
        histories = Histories(length, 0, 1, (), self.fleet.max_len)
        route = routes.get(variant, "affinity")
        return Cascade(
            self.fleet, stages=self.setting.stages, slo=slo, route=route, outcome=outcome, size=histories.length_of
        )

    async def largest_rate(self, variant: str, low: float, high: float, probes: int) -> float:
        """The largest rate that holds the SLO, by our own generator; 0 where none that was tried does."""

        async def holds(rate: float) -> bool:
            return (await self.run(variant, rate)).holds

        return await largest(holds, low, high, probes)

    async def longest_prefix(self, variant: str, rate: float, low: int, high: int, probes: int) -> int:
        """The longest history that holds the SLO at a fixed rate."""

        async def holds(length: float) -> bool:
            return (await self.run(variant, rate, whole(length))).holds

        return whole(await largest(holds, low, high, probes))

    async def judged_rate(self, variant: str, rate: float, steps: int = 4, step: float = 0.93) -> float:
        """The rate, or the next smaller one by `step`, that LoadGen calls VALID; 0 where it calls none so."""
        for _ in range(steps if rate else 0):
            if (await self.run(variant, rate, loadgen=True)).verdict == "VALID":
                return rate
            rate *= step
        return 0.0


def whole(length: float) -> int:
    """Lengths are tried in steps of 16 behaviours."""
    return int(round(length / 16)) * 16


async def largest(holds: Callable[[float], Awaitable[bool]], low: float, high: float, probes: int) -> float:
    """Bisection in steps of ratio: the largest value found to hold, 0 where none does."""
    best = 0.0
    for _ in range(probes):
        middle = (low * high) ** 0.5
        if await holds(middle):
            best = low = middle
        else:
            high = middle
    return best


async def length_of_time(fleet: Fleet, milliseconds: float, low: int, high: int) -> tuple[int, float]:
    """The longest history whose in-line ranking takes no more than this here and now, and what it takes."""
    found, taken = low, await fleet.inline_ms(low)

    async def fits(length: float) -> bool:
        nonlocal found, taken
        now = await fleet.inline_ms(whole(length))
        if now <= milliseconds:
            found, taken = whole(length), now
        return now <= milliseconds

    await largest(fits, low, high, 7)
    return found, taken


def _row(variant: str, length: int, outcome: Outcome, change: dict[str, float], measured: dict[str, Any]) -> dict[str, Any]:
    refused = {name.removeprefix("refused_"): int(n) for name, n in change.items() if name.startswith("refused_") and n}
    return {
        "variant": variant,
        "load": "LoadGen" if outcome.verdict else "own",
        "rate": outcome.offered,
        "length": length,
        "requests": len(outcome.latencies),
        "p50_ms": outcome.percentile(0.5),
        "p99_ms": outcome.percentile(0.99),
        "within_slo": outcome.goodput,
        "verdict": outcome.verdict or ("holds" if outcome.holds else "misses, ended early" if outcome.cut_short else "misses"),
        "hits": "/".join(str(outcome.hits[name]) for name in HITS),
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
