"""One fleet driven through variants, rates and lengths, and the search for the largest that holds.

Every run of a variant gets fresh instances and the same trace. Its length is a number of requests,
not of seconds, because a 99th percentile needs a number: of `requests` a hundredth may miss. A run
that has missed more ends there, since its verdict is certain. The trace begins in the middle of
sessions, but fresh instances know no user: the first `WARM_UP` seconds, which do not count, let
them see those users once. Where nothing is cached two seconds are enough. The searches of two
variants take turns, so that a slow minute meets both, and a miss counts when it happens twice, so
that a disturbance does not decide a bisection. Both variants are treated alike. Touch this when the
search or its rows change.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serving import trace as serving_trace
from benchmarks.serving.load import Cascade, Outcome, Route, loadgen_server, open_loop
from benchmarks.serving.trace import Histories, Session
from benchmarks.serving.worker import Fleet

WARM_UP, SHORT_WARM_UP = (
    8.0,
    2.0,
)  # seconds of the trace before what counts; the latter where nothing is kept
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
    # LoadGen believes in a 99th percentile with 99 % confidence: 3 misses of 1,001, 1 of 662
    loadgen_requests: int = 1010
    loadgen_seconds: float = 130.0


@dataclass
class Bench:
    """A fleet, a trace and the rows of all runs so far."""

    fleet: Fleet
    sessions: list[Session]
    setting: Setting
    length: int
    log: Callable[[str], None]
    rows: list[dict[str, Any]] = field(default_factory=list)

    async def run(
        self, variant: str, rate: float, length: int | None = None, *, loadgen: bool = False
    ) -> Outcome:
        """Run a variant once on fresh instances and keep a row.

        The first seconds of the trace warm up and do not count.
        """
        setting, length = self.setting, self.length if length is None else length
        config = setting.memory | setting.variants[variant]
        measured = await self.fleet.configure(config, length, expander=variant != "expander off")
        outcome = Outcome(rate, setting.slo)
        count = setting.loadgen_requests if loadgen else setting.requests
        seconds = min(count / rate, setting.loadgen_seconds if loadgen else setting.most_seconds)
        # The same trace for every variant at this rate; LoadGen makes its own times and may ask for
        # somewhat more.
        requests = serving_trace.replay(
            self.sessions, rate, (2 if loadgen else 1.3) * (WARM_UP + seconds), seed=1
        )
        requests = serving_trace.poisson(requests, rate, seed=1)
        skipped = 0.0 if config.get("relay", True) else WARM_UP - SHORT_WARM_UP
        warm = [
            replace(request, at=_rising(request.at - skipped))
            for request in requests
            if skipped <= request.at < WARM_UP
        ]
        requests = [
            replace(request, at=request.at - WARM_UP)
            for request in requests
            if request.at >= WARM_UP
        ]
        cascade = self._cascade(variant, length, Outcome(rate), setting.slo)
        await open_loop(cascade, warm)
        before = await self.fleet.stats()
        cascade.outcome = outcome
        if loadgen:
            with tempfile.TemporaryDirectory() as folder:
                await loadgen_server(cascade, requests, rate, seconds, Path(folder))
        else:
            await open_loop(
                cascade, [request for request in requests if request.at < seconds], give_up=True
            )
        after = await self.fleet.stats()
        change = {name: after[name] - before.get(name, 0.0) for name in after}
        row = _row(variant, length, outcome, change, measured) | {
            "score_diff": await self.fleet.score_diff()
        }
        self.rows.append(row)
        self.log(
            f"{variant:>18} {rate:6.1f}/s {length:5d} behaviours: {row['requests']:4d} requests, "
            f"p99 {row['p99_ms']:6.1f} ms, "
            f"within SLO {row['within_slo']:.3f}, hits {row['hits']}, {row['from_host']} from the "
            f"host, wasted {row['wasted']}, "
            f"late {row['late']}  {row['verdict']}"
        )
        return outcome

    def _cascade(self, variant: str, length: int, outcome: Outcome, slo: float) -> Cascade:
        routes: dict[str, Route] = {"affinity off": "random", "without": "least work"}
        histories = Histories(length, 0, 1, (), self.fleet.max_len)
        route = routes.get(variant, "affinity")
        return Cascade(
            self.fleet,
            stages=self.setting.stages,
            slo=slo,
            route=route,
            outcome=outcome,
            size=histories.length_of,
        )

    async def holds(self, variant: str, rate: float, length: int | None = None) -> bool:
        """Check whether a variant holds the SLO in one of two runs."""
        return (await self.run(variant, rate, length)).holds or (
            await self.run(variant, rate, length)
        ).holds

    async def largest_rates(
        self,
        variants: Sequence[str],
        low: float,
        high: float,
        probes: int,
        length: int | None = None,
    ) -> dict[str, float]:
        """Find each variant's largest rate that holds the SLO, 0 where none does."""
        searches = {variant: Bisection(low, high) for variant in variants}
        for _ in range(probes):
            for variant, search in searches.items():
                search.note(await self.holds(variant, search.middle, length))
        return {variant: search.best for variant, search in searches.items()}

    async def longest_prefixes(
        self, variants: Sequence[str], rate: float, low: float, high: float, probes: int
    ) -> dict[str, int]:
        """Find each variant's longest history that holds the SLO at a fixed rate."""
        searches = {variant: Bisection(low, high) for variant in variants}
        for _ in range(probes):
            for variant, search in searches.items():
                search.note(await self.holds(variant, rate, whole(search.middle)))
        return {variant: whole(search.best) for variant, search in searches.items()}

    async def valid_rate(
        self, variant: str, rate: float, steps: int = 4, step: float = 0.85
    ) -> float:
        """Find the rate, or the next smaller one, that LoadGen calls VALID; 0 where none is."""
        for _ in range(steps if rate else 0):
            if (await self.run(variant, rate, loadgen=True)).verdict == "VALID":
                return rate
            rate *= step
        return 0.0


def _rising(at: float) -> float:
    """Begin the warm-up at half the rate: while no user is known, requests cost the most."""
    return 2 * at if at < WARM_UP / 2 else at + WARM_UP / 2


def whole(length: float) -> int:
    """Round a length to a multiple of 16 behaviours."""
    return round(length / 16) * 16


@dataclass
class Bisection:
    """A search by ratio for the largest value that holds; `best` is 0 where none does."""

    low: float
    high: float
    best: float = 0.0

    @property
    def middle(self) -> float:
        """The next value to try."""
        return (self.low * self.high) ** 0.5

    def note(self, holds: bool) -> None:
        """Record whether the middle value holds."""
        if holds:
            self.best = self.low = self.middle
        else:
            self.high = self.middle


async def length_of_time(
    fleet: Fleet, milliseconds: float, low: int, high: int
) -> tuple[int, float]:
    """Find the longest history whose in-line ranking stays within a time, and its time."""
    search, taken = Bisection(low, high), 0.0
    for _ in range(7):
        length = whole(search.middle)
        now = await fleet.inline_ms(length)
        search.note(now <= milliseconds)
        taken = now if now <= milliseconds else taken
    return whole(search.best or low), taken


def _row(
    variant: str, length: int, outcome: Outcome, change: dict[str, float], measured: dict[str, Any]
) -> dict[str, Any]:
    refused = {
        name.removeprefix("refused_"): int(n)
        for name, n in change.items()
        if name.startswith("refused_") and n
    }
    return {
        "variant": variant,
        "load": "LoadGen" if outcome.verdict else "own",
        "rate": outcome.offered,
        "length": length,
        "requests": len(outcome.latencies),
        "p50_ms": outcome.percentile(0.5),
        "p99_ms": outcome.percentile(0.99),
        "within_slo": outcome.goodput,
        "verdict": outcome.verdict
        or ("holds" if outcome.holds else "misses, ended early" if outcome.cut_short else "misses"),
        "hits": "/".join(str(outcome.hits[name]) for name in HITS),
        "from_host": int(
            change.get("prefixes_reloaded", 0) + change.get("prefixes_extended_from_host", 0)
        ),
        "wasted": int(change.get("wasted", 0)),
        "late": int(change.get("late", 0)),
        "samples": {
            "latencies_ms": [
                round(1e3 * latency, 3) if np.isfinite(latency) else None
                for latency in outcome.latencies
            ],
            "refused": refused,
            "errors": dict(outcome.errors),
            "predicted_ms": {name: measured[name] for name in ("inline_ms", "hit_ms")},
            "instances": change,
        },
    }
