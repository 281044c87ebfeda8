"""The largest rate of an ideal queue: measured service times, no overhead, no estimate, no noise.

In line all instances share one queue. With pre-inference every request has two pieces of work on
one instance, the first of which waits for whatever ranks. Touch this when the protocol's ideal
changes.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.serving.load import LONGEST_STAGE, STAGE_MEAN, STAGE_VARIATION
from benchmarks.serving.trace import stage_times

REQUESTS = 20_000
STEPS = 12  # halvings of the ratio between the rates that hold and do not


def inline_rate(seconds: Sequence[float], instances: int, slo: float, seed: int = 0) -> float:
    """Return the largest rate at which one queue before `instances` keeps its p99 within `slo`."""
    rng = np.random.default_rng(seed)
    gaps_N = rng.exponential(1.0, REQUESTS)
    service = rng.choice(np.asarray(seconds), REQUESTS).tolist()

    def p99(rate: float) -> float:
        free = [0.0] * instances
        latencies = []
        for at, taken in zip((np.cumsum(gaps_N) / rate).tolist(), service, strict=True):
            end = max(at, heapq.heappop(free)) + taken
            heapq.heappush(free, end)
            latencies.append(end - at)
        return float(np.quantile(latencies, 0.99))

    return _largest(p99, slo, instances / float(np.mean(seconds)))


@dataclass(frozen=True)
class RelayTimes:
    """Service times with pre-inference, and the shares of requests that are not found.

    Of all requests `computed` need a pre-inference, and `inline` are ranked in line after all,
    because nobody announced them or the trigger refused.
    """

    hit: Sequence[float]
    prefill: Sequence[float]
    rank: Sequence[float]  # in line
    computed: float = 1.0
    inline: float = 0.0


def relay_rate(times: RelayTimes, instances: int, slo: float, seed: int = 0) -> float:
    """Return the largest rate with pre-inference."""
    rng = np.random.default_rng(seed)
    gaps_N = rng.exponential(1.0, REQUESTS)
    hits_N = rng.choice(np.asarray(times.hit), REQUESTS)
    drawn_N = rng.random(REQUESTS)
    needed_N = drawn_N < times.computed
    prefills = (needed_N * rng.choice(np.asarray(times.prefill), REQUESTS)).tolist()
    inline_N = ~needed_N & (drawn_N < times.computed + times.inline)
    ranks_N = np.where(inline_N, rng.choice(np.asarray(times.rank), REQUESTS), hits_N)
    ranks, alone = ranks_N.tolist(), inline_N.tolist()
    stages_N = stage_times(STAGE_MEAN, STAGE_VARIATION, LONGEST_STAGE, REQUESTS, seed)

    def p99(rate: float) -> float:
        arrivals = np.cumsum(gaps_N) / rate
        events = [(at, place, False) for place, at in enumerate(arrivals.tolist())]
        events += [(at, place, True) for place, at in enumerate((arrivals + stages_N).tolist())]
        servers = [_Server() for _ in range(instances)]
        owner: dict[int, _Server] = {}
        for at, place, is_ranking in sorted(events):
            for server in servers:
                server.advance(at)
            if is_ranking:
                chosen = owner.pop(place, None) or min(servers, key=_Server.work)
                chosen.rank(place, at, ranks[place])
            elif not alone[place]:
                owner[place] = min(servers, key=_Server.work)
                owner[place].announce(place, prefills[place])
        latencies = [latency for server in servers for latency in server.finish()]
        return float(np.quantile(latencies, 0.99))

    work = float(np.mean(ranks_N)) + times.computed * float(np.mean(times.prefill))
    return _largest(p99, slo, instances / work)


def _largest(p99: Callable[[float], float], slo: float, capacity: float) -> float:
    """Return the largest rate below `capacity` whose p99 is within the SLO, 0 where none is."""
    low, high = 0.02 * capacity, capacity
    if p99(low) > slo:
        return 0.0
    for _ in range(STEPS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if p99(middle) <= slo else (low, middle)
    return low


@dataclass
class _Server:
    """One instance: rankings in their order, pre-inferences while nothing ranks."""

    now: float = 0.0
    ranks: deque[list[float]] = field(default_factory=deque)  # remaining seconds, scheduled at
    prefills: dict[int, float] = field(default_factory=dict)  # remaining seconds, in order
    latencies: list[float] = field(default_factory=list)

    def work(self) -> float:
        return sum(rank[0] for rank in self.ranks) + sum(self.prefills.values())

    def announce(self, place: int, seconds: float) -> None:
        if seconds:
            self.prefills[place] = seconds

    def rank(self, place: int, at: float, seconds: float) -> None:
        self.ranks.append([self.prefills.pop(place, 0.0) + seconds, at])

    def advance(self, to: float) -> None:
        """Work until a moment."""
        while self.now < to and (self.ranks or self.prefills):
            if self.ranks:
                first = self.ranks[0]
                spent = min(to - self.now, first[0])
                first[0] -= spent
                self.now += spent
                if first[0] <= 1e-12:
                    self.ranks.popleft()
                    self.latencies.append(self.now - first[1])
            else:
                place = next(iter(self.prefills))
                spent = min(to - self.now, self.prefills[place])
                self.prefills[place] -= spent
                self.now += spent
                if self.prefills[place] <= 1e-12:
                    del self.prefills[place]
        self.now = max(self.now, to)

    def finish(self) -> list[float]:
        """Finish all rankings and return their latencies."""
        self.advance(self.now + sum(rank[0] for rank in self.ranks) + 1e-9)
        return self.latencies
