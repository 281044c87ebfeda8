"""The load of the serving benchmark: requests over HTTP, our open-loop generator, MLPerf LoadGen.

    arrival ──/v1/events, /v1/preinfer──▶ router        the stage before ranking takes its time
            ──/v1/rank, after that stage──▶ router

Latency counts from the moment at which ranking was scheduled to begin. A refusal or a failure is a
miss. LoadGen sees a query completed `LONGEST_STAGE` plus this latency after its arrival, so that it
judges the ranking stage alone. Touch this when a request takes another way.
"""

import asyncio
import math
import random
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np

from benchmarks.serving.trace import Request, Window, poisson_times, stage_times
from benchmarks.serving.users import APPENDED, Population
from slipstream.history.user_history import History
from slipstream.serving.http import messages as m
from slipstream.serving.http.announcements import Announcements
from slipstream.serving.http.endpoints import DEADLINE_HEADER
from slipstream.serving.router.upstream import Upstream, UpstreamError

STAGE_MEAN, STAGE_VARIATION, LONGEST_STAGE = 0.12, 0.3, 0.4
PATIENT_SECONDS = 5.0  # for requests that are not ranked within the SLO: appends, warm-up
COMPARED = 4  # answers of a run that are compared with the full pass
LOADGEN_RUNS = threading.Event()  # set while its thread runs, which cannot be interrupted


class _Answer(msgspec.Struct):
    """What is read of every ranking answer."""

    hit: str
    behaviours: int


@dataclass(frozen=True)
class Kept:
    """An answer to compare: whose, which page, the history's length, and the whole answer."""

    user: int
    pages: int  # how often the user had asked before
    answer: m.RankAnswer


@dataclass
class Outcome:
    """The latencies, hits and errors of one run."""

    rate: float
    slo: float
    latencies: list[float] = field(default_factory=list)  # seconds, inf for a miss
    hits: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    announced: Counter[str] = field(default_factory=Counter)  # by the trigger's reason
    lags: list[float] = field(default_factory=list)  # how late the generator sent a ranking
    kept: list[Kept] = field(default_factory=list)
    verdict: str = ""  # LoadGen's, where it drove
    cut_short: bool = False  # ended when it could not hold any more

    def percentile(self, share: float) -> float:
        """Return a percentile in milliseconds; inf where more than the rest failed."""
        if not self.latencies:
            return math.inf
        ordered = sorted(self.latencies)
        return 1e3 * ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]

    @property
    def misses(self) -> int:
        """Requests answered after the SLO, or not at all."""
        return sum(latency > self.slo for latency in self.latencies)

    @property
    def within_slo(self) -> float:
        """The share of requests answered within the SLO."""
        return 1.0 - self.misses / max(1, len(self.latencies))

    @property
    def holds(self) -> bool:
        """Whether the 99th percentile kept the SLO, misses included."""
        return not self.cut_short and self.misses <= len(self.latencies) // 100


class Cascade:
    """Sends the requests of one run: a window of users that the server has not seen."""

    def __init__(
        self,
        url: str,
        population: Population,
        first_user: int,
        window: Window,
        outcome: Outcome,
        *,
        candidates: int,
        preinfer: bool,
        seed: int,
    ) -> None:
        address = urlsplit(url)
        assert address.hostname is not None and address.port is not None
        self.upstream = Upstream(address.hostname, address.port)
        self.population, self.first_user, self.window = population, first_user, window
        self.outcome, self.candidates, self.preinfer = outcome, candidates, preinfer
        count = len(window.requests)
        self.stages = stage_times(STAGE_MEAN, STAGE_VARIATION, LONGEST_STAGE, count, seed)
        self._compared = set(random.Random(seed).sample(range(count), min(COMPARED, count)))
        self._pages = Counter(dict.fromkeys(window.before, 1))  # how often each user has asked
        self._head = f" HTTP/1.1\r\nhost: {address.netloc}\r\ncontent-type: application/json\r\n"
        self._decode = msgspec.json.Decoder(_Answer).decode
        self._announcements = Announcements()

    async def run(self, place: int, arrival: float) -> float:
        """Serve the request at a place of the window; return the latency, inf for a miss."""
        request, outcome = self.window.requests[place], self.outcome
        pages = self._pages[request.user]
        self._pages[request.user] += 1
        rank_at = arrival + float(self.stages[place])
        announced = asyncio.create_task(self._announce(request, pages, rank_at))
        body = self._rank_body(request, pages)
        await asyncio.sleep(max(0.0, rank_at - time.monotonic()))
        ticket = announced.result() if announced.done() else None
        outcome.lags.append(time.monotonic() - rank_at)
        latency, error = math.inf, ""
        try:
            answer = await self._post("/v1/rank", _with_ticket(body, ticket), outcome.slo)
            latency = time.monotonic() - rank_at
            error = "" if answer.status == 200 else f"{answer.status} {_code(answer.body)}"
        except (UpstreamError, TimeoutError) as failure:
            error = type(failure).__name__
        if error:
            latency = math.inf
            outcome.errors[error] += 1
        else:
            outcome.hits[self._decode(answer.body).hit] += 1
            if place in self._compared:
                whole = msgspec.json.decode(answer.body, type=m.RankAnswer)
                outcome.kept.append(Kept(self.first_user + request.user, pages, whole))
        outcome.latencies.append(latency)
        await announced
        return latency

    async def recommend(self, place: int, arrival: float) -> float:
        """Ask for recommendations; return the latency from the arrival, inf for a failure."""
        user = self.population.id_of(self.first_user + self.window.requests[place].user)
        asked = m.RecommendRequest(user, count=10, retrieve=self.candidates)
        latency = math.inf
        try:
            answer = await self._post("/v1/recommend", msgspec.json.encode(asked), PATIENT_SECONDS)
            if answer.status == 200:
                latency = time.monotonic() - arrival
                self.outcome.hits[self._decode(answer.body).hit] += 1
            else:
                self.outcome.errors[f"{answer.status} {_code(answer.body)}"] += 1
        except (UpstreamError, TimeoutError) as failure:
            self.outcome.errors[type(failure).__name__] += 1
        self.outcome.latencies.append(latency)
        return latency

    async def warm_up(self, clients: int) -> None:
        """Ask for the pages before the window, oldest first, as fast as the server answers."""
        users = iter(self.window.before)

        async def ask() -> None:
            for user in users:
                body = self._rank_body(Request(user, again=False), 0)
                await self._post("/v1/rank", _with_ticket(body, None), PATIENT_SECONDS)

        await asyncio.gather(*(ask() for _ in range(clients)))

    async def closed_loop(self, clients: int, count: int) -> list[dict[str, float]]:
        """Serve `count` requests, each client waiting for its answer; return their seconds.

        `rank` is the first ranking, after the announcement where there is one; `hit` the same one
        again, where prefixes are kept.
        """
        places = iter(range(count))
        taken: list[dict[str, float]] = []

        async def ask() -> None:
            for place in places:
                request = self.window.requests[place]
                body, found = self._rank_body(request, 0), {}
                begin = time.monotonic()
                ticket = None
                if self.preinfer:
                    ticket = await self._preinfer(request, 0.0)
                await self._post("/v1/rank", _with_ticket(body, ticket), PATIENT_SECONDS)
                found["rank"] = time.monotonic() - begin
                if self.preinfer:
                    begin = time.monotonic()
                    await self._post("/v1/rank", _with_ticket(body, ticket), PATIENT_SECONDS)
                    found["hit"] = time.monotonic() - begin
                taken.append(found)

        await asyncio.gather(*(ask() for _ in range(clients)))
        return taken

    async def metrics(self) -> dict[str, float]:
        """Return the counters of the instances, summed, and of the router."""
        answer = await self.upstream.request(
            f"GET /metrics{self._head}content-length: 0\r\n\r\n".encode(), PATIENT_SECONDS
        )
        total: dict[str, float] = defaultdict(float)
        for line in answer.body.decode().splitlines():
            name, _, value = line.partition(" ")
            name = name.partition("{")[0]
            if not line.startswith("#") and ("instance_" in name or "router_" in name):
                name = name.removeprefix("slipstream_").removeprefix("instance_")
                total[name.removesuffix("_total")] += float(value.split()[0])
        return dict(total)

    def close(self) -> None:
        """Close all connections."""
        self.upstream.close()

    async def _announce(self, request: Request, pages: int, rank_at: float) -> str | None:
        """Append what the user did since the last page, and announce the ranking.

        One request does both; a history that gains nothing by it is not announced.
        """
        user = self.first_user + request.user
        added = self.population.appended_by(user, pages) if request.again else None
        behaviours = self.population.length_of(user) + pages * APPENDED
        announces = self.preinfer and self._announcements.worth(behaviours)
        try:
            if added is not None:
                return await self._append(user, added, announces)
            return await self._preinfer(request, STAGE_MEAN) if announces else None
        except (UpstreamError, TimeoutError) as failure:
            self.outcome.errors[f"announced {type(failure).__name__}"] += 1
            return None

    async def _append(self, user: int, added: History, announces: bool) -> str | None:
        events = m.EventsRequest(
            self.population.id_of(user),
            added.items.tolist(),
            added.timestamps.tolist(),
            {name: column.tolist() for name, column in (added.actions or {}).items()},
            preinfer=m.Announcement(rank_in_ms=1e3 * STAGE_MEAN) if announces else None,
        )
        answer = await self._post("/v1/events", msgspec.json.encode(events), PATIENT_SECONDS)
        if answer.status >= 300:
            self.outcome.errors[f"events {answer.status}"] += 1
            return None
        told = msgspec.json.decode(answer.body, type=m.EventsAnswer).preinfer
        if announces and told is None:
            self.outcome.errors["announced"] += 1
        return None if told is None else self._note(told)

    async def _preinfer(self, request: Request, rank_in: float) -> str | None:
        user = self.population.id_of(self.first_user + request.user)
        body = msgspec.json.encode(m.PreinferRequest(user, rank_in_ms=1e3 * rank_in))
        answer = await self._post("/v1/preinfer", body, PATIENT_SECONDS)
        if answer.status >= 300:
            self.outcome.errors[f"preinfer {answer.status}"] += 1
            return None
        return self._note(msgspec.json.decode(answer.body, type=m.PreinferAnswer))

    def _note(self, told: m.PreinferAnswer) -> str:
        self._announcements.note(told)
        self.outcome.announced[told.reason] += 1
        return told.ticket

    def _rank_body(self, request: Request, pages: int) -> bytes:
        user = self.first_user + request.user
        items = self.population.candidates_of(user, pages, self.candidates)
        return msgspec.json.encode({"user": self.population.id_of(user), "candidates": items})

    async def _post(self, path: str, body: bytes, seconds: float) -> Any:
        head = f"POST {path}{self._head}{DEADLINE_HEADER}: {1e3 * seconds:g}\r\n"
        request = head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body
        return await self.upstream.request(request, seconds + 1.0)


def _with_ticket(body: bytes, ticket: str | None) -> bytes:
    return body if ticket is None else body[:-1] + b',"ticket":"%s"}' % ticket.encode()


def _code(body: bytes) -> str:
    """Return the reason of a refusal."""
    try:
        return str(msgspec.json.decode(body, type=dict)["error"])
    except (msgspec.DecodeError, KeyError):
        return "unknown"


async def open_loop(
    cascade: Cascade,
    places: Sequence[int],
    *,
    give_up: bool,
    seed: int,
    recommend: bool = False,
    disturbed: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Send every request at its time, whatever became of those before it.

    It ends as soon as the run is `disturbed`, and with `give_up` as soon as more requests have
    missed than a 99th percentile allows.
    """
    outcome, serve = cascade.outcome, cascade.recommend if recommend else cascade.run
    begin, tasks = time.monotonic() + 0.05, []
    times = begin + poisson_times(outcome.rate, len(places), seed)
    for place, at in zip(places, times.tolist(), strict=True):
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        if disturbed() or (give_up and outcome.misses > len(places) // 100):
            outcome.cut_short = True
            break
        tasks.append(asyncio.create_task(serve(place, at)))
    await asyncio.gather(*tasks)
    return outcome


async def loadgen_server(cascade: Cascade, places: Sequence[int], *, seed: int) -> Outcome:
    """Run LoadGen's Server scenario; its n-th query is the n-th request."""
    import mlperf_loadgen as lg

    loop, outcome = asyncio.get_running_loop(), cascade.outcome
    upcoming, tasks = iter(places), set()
    limit = LONGEST_STAGE + outcome.slo

    async def answer(query: Any, arrival: float) -> None:
        latency = await cascade.run(next(upcoming), arrival)
        due = arrival + LONGEST_STAGE + min(latency, outcome.slo + 0.02)
        await asyncio.sleep(max(0.0, due - time.monotonic()))
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
    settings.server_target_qps = outcome.rate
    settings.server_target_latency_ns = int(limit * 1e9)
    settings.server_target_latency_percentile = 0.99
    settings.min_duration_ms = 0
    settings.min_query_count = settings.max_query_count = len(places)
    settings.schedule_rng_seed = seed
    done = loop.create_future()
    with tempfile.TemporaryDirectory() as folder:
        log = lg.LogSettings()
        log.log_output.outdir, log.log_output.copy_summary_to_stdout = folder, False
        log.enable_trace = False

        def drive() -> None:
            LOADGEN_RUNS.set()
            sut = lg.ConstructSUT(issue, lambda: None)
            library = lg.ConstructQSL(1, 1, lambda _: None, lambda _: None)
            lg.StartTestWithLogSettings(sut, library, settings, log)
            lg.DestroyQSL(library)
            lg.DestroySUT(sut)
            LOADGEN_RUNS.clear()
            loop.call_soon_threadsafe(done.set_result, None)

        threading.Thread(target=drive, daemon=True).start()
        await done
        summary = (Path(folder) / "mlperf_log_summary.txt").read_text()
    outcome.verdict = "VALID" if "Result is : VALID" in summary else "INVALID"
    return outcome


def noise_floor(seconds: float = 1.0) -> float:
    """Return how late this machine wakes a process that sleeps 1 ms: p99 in milliseconds."""
    late, end = [], time.perf_counter() + seconds
    while (begin := time.perf_counter()) < end:
        time.sleep(0.001)
        late.append(time.perf_counter() - begin - 0.001)
    return 1e3 * float(np.quantile(late, 0.99))
