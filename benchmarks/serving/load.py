"""Open-loop load of the serving benchmark: our own generator, and MLPerf LoadGen's Server scenario.

    arrival ──pre-inference signal──▶ instance        retrieval + pre-processing take a stated time
                                                      meanwhile
            ──ranking, `stages` seconds later──▶ the same instance (affinity), or any (affinity off)

Routing is the router's own (serving/router/balancer.py), in this process: by hash,
bounded by outstanding tokens, decided at the first signal and kept by the ticket. Without
pre-inference there is no signal, and the instance with the least outstanding work ranks. Without
affinity, signal and ranking go anywhere.

Latency of the ranking stage counts from when ranking was scheduled to begin, not from when it was
sent. A refusal or failure counts as a miss. LoadGen sees the whole cascade, so its limit is
`stages` + SLO, and a failed request is completed only after it. Touch this when a request takes
another way.
"""

import asyncio
import importlib.util
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.serving.trace import Request
from benchmarks.serving.worker import Fleet, Link
from slipstream.serving.router.balancer import InstanceState, LoadBalancer

LOADGEN_RUNS = threading.Event()  # set while its thread runs, which cannot be interrupted
Route = Literal["affinity", "random", "least work"]


@dataclass
class Outcome:
    """The latencies, hits and errors of one run."""

    offered: float  # requests a second
    slo: float = 0.08
    latencies: list[float] = field(default_factory=list)  # seconds, inf for a miss
    hits: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    verdict: str | None = None  # LoadGen's, where it drove
    cut_short: bool = False  # given up when the verdict could not change any more

    def percentile(self, share: float) -> float:
        """Return a percentile in milliseconds; inf when more than the rest failed."""
        if not self.latencies:
            return float("inf")
        ordered = sorted(self.latencies)
        return 1e3 * ordered[min(len(ordered) - 1, int(np.ceil(share * len(ordered))) - 1)]

    @property
    def misses(self) -> int:
        """Requests answered after the SLO, or not at all."""
        return sum(latency > self.slo for latency in self.latencies)

    @property
    def goodput(self) -> float:
        """The share of requests answered within the SLO."""
        return 1.0 - self.misses / max(1, len(self.latencies))

    @property
    def holds(self) -> bool:
        """Whether the 99th percentile kept the SLO, misses included."""
        return not self.cut_short and self.percentile(0.99) <= 1e3 * self.slo


class Cascade:
    """Sends the requests of a run; `size` gives the behaviours of a request, for routing."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        stages: float,
        slo: float,
        route: Route,
        outcome: Outcome,
        size: Callable[[int, int], int],
    ) -> None:
        self.fleet, self.stages, self.slo, self.route, self.outcome, self._size = (
            fleet,
            stages,
            slo,
            route,
            outcome,
            size,
        )
        self.balancer = LoadBalancer(
            [InstanceState(f"i-{number}", "") for number in range(len(fleet.links))]
        )
        self._links = dict(zip(self.balancer.instances, fleet.links, strict=True))
        self._tickets: dict[int, str] = {}  # the instance a user's last ticket names
        self._random = random.Random(0)

    async def run(self, request: Request, arrival: float) -> float:
        """Send one request from its arrival (monotonic); returns the latency, inf for a miss."""
        rank_at = arrival + self.stages
        signal = None
        if self.route != "least work":
            member = self._choose(request)
            self._tickets[request.user] = member.name
            signal = asyncio.create_task(self._ask(member, request, op="preinfer", rank_at=rank_at))
        await asyncio.sleep(max(0.0, rank_at - time.monotonic()))
        reply = await self._ask(
            self._choose(request), request, op="rank", deadline=rank_at + self.slo
        )
        latency = time.monotonic() - rank_at
        if signal is not None:
            await signal
        if "error" in reply:
            self.outcome.errors[reply["error"]] += 1
            latency = float("inf")
        else:
            self.outcome.hits[reply["hit"]] += 1
        self.outcome.latencies.append(latency)
        return latency

    async def _ask(self, member: InstanceState, request: Request, **message: Any) -> dict[str, Any]:
        link: Link = self._links[member]
        with self.balancer.outstanding(member, self._size(request.user, request.page), 0.0):
            reply = await link.ask(user=request.user, page=request.page, **message)
        member.reported = int(reply.get("backlog", 0))
        return reply

    def _choose(self, request: Request) -> InstanceState:
        members = self.balancer.instances
        if self.route == "random":
            return self._random.choice(members)
        if self.route == "least work":
            return min(members, key=lambda member: member.load)
        tokens, owner = self._size(request.user, request.page), self._tickets.get(request.user)
        return self.balancer.choose(str(request.user), tokens, 0.0, owner=owner) or members[0]


async def open_loop(cascade: Cascade, requests: list[Request], give_up: bool = False) -> Outcome:
    """Send every request at its time, whatever became of those before it.

    With `give_up` it ends as soon as more requests have missed than a 99th percentile allows.
    """
    begin = time.monotonic() + 0.05
    tasks = []
    outcome, allowed = cascade.outcome, len(requests) // 100
    for number, request in enumerate(requests):
        await asyncio.sleep(max(0.0, begin + request.at - time.monotonic()))
        if give_up and not number % 8 and outcome.misses > allowed:
            outcome.cut_short = True
            break
        tasks.append(asyncio.create_task(cascade.run(request, begin + request.at)))
    await asyncio.gather(*tasks)
    return outcome


def loadgen_at_hand() -> bool:
    """Check whether MLPerf LoadGen (package mlcommons-loadgen) is installed."""
    return importlib.util.find_spec("mlperf_loadgen") is not None


async def loadgen_server(
    cascade: Cascade, requests: list[Request], rate: float, seconds: float, folder: Path
) -> Outcome:
    """Run LoadGen's Server scenario; its n-th query is the n-th request of the trace."""
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
    sut, library = (
        lg.ConstructSUT(issue, lambda: None),
        lg.ConstructQSL(1, 1, lambda _: None, lambda _: None),
    )
    done = loop.create_future()

    def drive() -> None:
        LOADGEN_RUNS.set()
        lg.StartTestWithLogSettings(sut, library, settings, log)
        lg.DestroyQSL(library)
        lg.DestroySUT(sut)
        LOADGEN_RUNS.clear()
        loop.call_soon_threadsafe(done.set_result, None)

    threading.Thread(target=drive, daemon=True).start()
    await done
    summary = (folder / "mlperf_log_summary.txt").read_text()
    cascade.outcome.verdict = "VALID" if "Result is : VALID" in summary else "INVALID"
    return cascade.outcome
