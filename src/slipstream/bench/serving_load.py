"""Open-loop load for the serving benchmark: the cascade of one request, our own generator, and MLPerf LoadGen's Server scenario.

    arrival ──pre-inference signal──▶ instance        retrieval + pre-processing take a stated time meanwhile
            ──ranking, `stages` seconds later──▶ the same instance (affinity), or any (affinity off)

Routing is the router's in small: a user's own instance by hash, unless it has well over its share of outstanding requests; then,
once, another one, which the user keeps. Without affinity, and without the relay race, the instance with the least outstanding
requests serves, the best there is when nothing is kept.

Latency of the ranking stage counts from when ranking was scheduled to begin, not from when it was sent. A refusal or failure counts
as a miss. LoadGen sees the whole cascade, so its limit is `stages` + SLO, and a failed request is completed only after it.
"""

import asyncio
import importlib.util
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.bench.serving_trace import Request
from slipstream.bench.serving_worker import Fleet


@dataclass
class Outcome:
    """What became of the requests of one run."""

    offered: float  # requests a second
    latencies: list[float] = field(default_factory=list)  # seconds, inf for a miss
    hits: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    verdict: str | None = None  # LoadGen's, where it drove

    def percentile(self, share: float) -> float:
        """In milliseconds; inf when more than the rest failed."""
        if not self.latencies:
            return float("inf")
        ordered = sorted(self.latencies)
        return 1e3 * ordered[min(len(ordered) - 1, int(np.ceil(share * len(ordered))) - 1)]

    def goodput(self, slo: float) -> float:
        """Share of requests answered within the SLO."""
        return sum(latency <= slo for latency in self.latencies) / max(1, len(self.latencies))


class Cascade:
    """Sends the requests of a fleet."""

    def __init__(self, fleet: Fleet, *, stages: float, slo: float, affinity: bool, outcome: Outcome) -> None:
        self.fleet, self.stages, self.slo, self.affinity, self.outcome = fleet, stages, slo, affinity, outcome
        self._homes: dict[int, int] = {}
        self._outstanding = [0] * len(fleet.links)

    async def run(self, request: Request, arrival: float) -> float:
        """One request from its arrival (monotonic); returns the ranking stage's latency, inf for a miss."""
        links = self.fleet.links
        first = self._home(request.user)
        rank_at = arrival + self.stages
        self._outstanding[first] += 1
        signal = asyncio.create_task(links[first].ask(op="preinfer", user=request.user, page=request.page, rank_at=rank_at))
        await asyncio.sleep(max(0.0, rank_at - time.monotonic()))
        self._outstanding[first] -= 1
        second = first if self.affinity else self._idlest()
        self._outstanding[second] += 1
        reply = await links[second].ask(op="rank", user=request.user, page=request.page, deadline=rank_at + self.slo)
        latency = time.monotonic() - rank_at
        self._outstanding[second] -= 1
        await signal
        if "error" in reply:
            self.outcome.errors[reply["error"]] += 1
            latency = float("inf")
        else:
            self.outcome.hits[reply["hit"]] += 1
        self.outcome.latencies.append(latency)
        return latency

    def _idlest(self) -> int:
        return min(range(len(self._outstanding)), key=self._outstanding.__getitem__)

    def _home(self, user: int) -> int:
        """The instance a user's requests go to, decided at the first signal."""
        if user not in self._homes:
            hashed, mean = user % len(self._outstanding), sum(self._outstanding) / len(self._outstanding)
            self._homes[user] = hashed if self._outstanding[hashed] <= 1.25 * mean + 1 else self._idlest()
        return self._homes[user]


async def open_loop(cascade: Cascade, requests: list[Request]) -> Outcome:
    """Every request at its time, whatever became of those before it."""
    begin = time.monotonic() + 0.05
    tasks = []
    for request in requests:
        await asyncio.sleep(max(0.0, begin + request.at - time.monotonic()))
        tasks.append(asyncio.create_task(cascade.run(request, begin + request.at)))
    await asyncio.gather(*tasks)
    return cascade.outcome


def loadgen_at_hand() -> bool:
    """Whether MLPerf LoadGen (package mlcommons-loadgen) is installed."""
    return importlib.util.find_spec("mlperf_loadgen") is not None


async def loadgen_server(cascade: Cascade, requests: list[Request], rate: float, seconds: float, folder: Path) -> Outcome:
    """MLPerf LoadGen, Server scenario: its Poisson schedule, its clock, its verdict. The n-th query is the trace's n-th request."""
    import mlperf_loadgen as lg

    loop = asyncio.get_running_loop()
    upcoming = iter(requests)
    tasks: set[asyncio.Task[None]] = set()
    limit = cascade.stages + cascade.slo

    async def answer(query: Any, arrival: float) -> None:
        latency = await cascade.run(next(upcoming), arrival)
        if latency == float("inf"):  # a miss may not look like a fast answer
            await asyncio.sleep(max(0.0, arrival + limit + 0.02 - time.monotonic()))
        lg.QuerySamplesComplete([lg.QuerySampleResponse(query, 0, 0)])

    def begin(query: Any, arrival: float) -> None:
        task = loop.create_task(answer(query, arrival))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def issue(samples: list[Any]) -> None:
        arrival = time.monotonic()
        for sample in samples:
            loop.call_soon_threadsafe(begin, sample.id, arrival)

    settings = lg.TestSettings()
    settings.scenario, settings.mode = lg.TestScenario.Server, lg.TestMode.PerformanceOnly
    settings.server_target_qps = rate
    settings.server_target_latency_ns = int(limit * 1e9)
    settings.server_target_latency_percentile = 0.99
    settings.min_duration_ms, settings.min_query_count = int(seconds * 1000), int(rate * seconds)
    settings.max_query_count = len(requests)
    log = lg.LogSettings()
    log.log_output.outdir, log.log_output.copy_summary_to_stdout = str(folder), False
    log.enable_trace = False
    sut, library = lg.ConstructSUT(issue, lambda: None), lg.ConstructQSL(1, 1, lambda _: None, lambda _: None)
    try:
        await asyncio.to_thread(lg.StartTestWithLogSettings, sut, library, settings, log)
    finally:
        lg.DestroyQSL(library)
        lg.DestroySUT(sut)
    summary = (folder / "mlperf_log_summary.txt").read_text()
    cascade.outcome.verdict = "VALID" if "Result is : VALID" in summary else "INVALID"
    return cascade.outcome
