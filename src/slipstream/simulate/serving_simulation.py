"""Simulated serving: the shipped policies under traffic you do not have, in virtual time.

    report = simulate_serving(instances=100, rate=2000, requests=100_000)
    report.within_slo, report.p99_ms, report.hits

Trigger, scheduler, cost model, both tiers of prefixes, balancer and outlier detection are serving's
own classes; the engine below them takes time and computes nothing. Touch this when a report shows
something else.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from slipstream.errors import SlipstreamError
from slipstream.serving.instance.instance_config import InstanceConfig
from slipstream.simulate.fleet import Fleet, FleetConfig
from slipstream.simulate.shared_cores import CallCosts
from slipstream.simulate.simulated_engine import EngineSpec
from slipstream.simulate.traffic import Arrivals, Traffic, Trouble, draw_arrivals

HITS = ("device", "host", "joined", "extended", "inline")
MAX_INSTANCES = 10_000
GRID = 1.15  # rates of a search lie on powers of this
_LEAST = 0.99  # share of requests within the SLO that a rate must hold


@dataclass(frozen=True)
class ServingReport:
    """A simulated run: latencies from the moment at which ranking was due."""

    instances: int
    rate: float
    requests: int
    slo_ms: float
    within_slo: float  # share of all requests; refused and lost ones are outside
    answered: float
    p50_ms: float
    p99_ms: float  # of all requests; inf where more than 1 % were not answered
    hits: dict[str, int]  # answered requests by where the prefix was found
    filled: dict[str, int]  # prefixes by what they were made from
    wasted: int  # pre-inferences whose request never came in time
    admitted: int
    refused: dict[str, int]  # signals and requests, by reason
    busy: float  # share of the time that compute threads worked
    retries: int
    lost: int
    ejected: dict[str, int]

    def row(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        return asdict(self)


def simulate_serving(
    *,
    instances: int,
    rate: float,
    requests: int = 10_000,
    slo_ms: float = 80.0,
    spec: EngineSpec | None = None,
    traffic: Traffic | dict[str, Any] | None = None,
    arrivals: Arrivals | None = None,
    config: InstanceConfig | None = None,
    trouble: Trouble | dict[str, Any] | None = None,
    http_ms: float = 3.0,
    calls: CallCosts | dict[str, Any] | None = None,
    routers: int = 1,
    seed: int = 0,
) -> ServingReport:
    """Simulate a fleet under Poisson arrivals of `rate` ranking requests a second.

    `traffic` describes sessions and lengths, `spec` the model and what its passes take, `config`
    the settings of every instance, `arrivals` a load to replay in place of drawn requests, `calls`
    a request takes besides its pass, and of which cores; `http_ms` is the time on the way that
    uses no core.
    """
    if not 1 <= instances <= MAX_INSTANCES:
        raise SlipstreamError(f"a fleet has 1 to {MAX_INSTANCES} instances, not {instances}")
    told = (
        traffic if isinstance(traffic, dict) else ({} if traffic is None else traffic.model_dump())
    )
    load = Traffic.model_validate({**told, "rate": rate, "requests": requests})
    settings = config or InstanceConfig(host_path="simulated")
    place = FleetConfig(
        instances=instances,
        spec=spec or EngineSpec(),
        instance=settings,
        slo=slo_ms / 1e3,
        http_seconds=http_ms / 1e3,
        signals=settings.relay and settings.preinfer,
        affinity=settings.relay,
        alone=routers == 1,
        calls=calls if isinstance(calls, CallCosts) else CallCosts.model_validate(calls or {}),
    )
    fleet = Fleet(place, arrivals or draw_arrivals(load, seed), load, seed)
    faults = trouble if isinstance(trouble, Trouble) else Trouble.model_validate(trouble or {})
    fleet.run(faults)
    return _report(fleet, place, load)


def _report(fleet: Fleet, config: FleetConfig, traffic: Traffic) -> ServingReport:
    latency_R = fleet.latency_R
    totals: dict[str, float] = {}
    for node in fleet.nodes:
        for name, count in node.totals().items():
            totals[name] = totals.get(name, 0) + count
    span = fleet.loop.now * len(fleet.nodes)
    refused = {
        name.removeprefix("refused_"): int(count)
        for name, count in {**totals, **fleet.counts}.items()
        if name.startswith("refused_") and count
    }
    return ServingReport(
        instances=config.instances,
        rate=traffic.rate,
        requests=traffic.requests,
        slo_ms=1e3 * config.slo,
        within_slo=float((latency_R <= config.slo + 1e-9).mean()),
        answered=float(np.isfinite(latency_R).mean()),
        p50_ms=1e3 * float(np.quantile(latency_R, 0.5, method="higher")),
        p99_ms=1e3 * float(np.quantile(latency_R, 0.99, method="higher")),
        hits={hit: int(fleet.counts[f"hit_{hit}"]) for hit in HITS},
        filled={
            name.removeprefix("filled_"): int(count)
            for name, count in totals.items()
            if name.startswith("filled_")
        },
        wasted=int(totals.get("wasted", 0)),
        admitted=int(totals.get("preinfer_admitted", 0)),
        refused=refused,
        busy=sum(node.busy() for node in fleet.nodes) / span if span else 0.0,
        retries=fleet.counts["retries"],
        lost=fleet.counts["lost"],
        ejected=dict(fleet.balancer.ejected),
    )


def largest_rate(
    holds: Callable[[float], bool], first: float, *, least: float = 1.0, most: float = 1e5
) -> float:
    """Return the largest rate on the grid 1.15^k that holds, searched from `first`; 0: none."""
    place = round(np.log(max(first, least)) / np.log(GRID))

    def at(k: int) -> float:
        return float(GRID**k)

    if holds(at(place)):
        while at(place + 1) <= most and holds(at(place + 1)):
            place += 1
        return at(place)
    while at(place - 1) >= least:
        place -= 1
        if holds(at(place)):
            return at(place)
    return 0.0


def slo_rate(first: float, requests: int = 20_000, **settings: Any) -> float:
    """Return the largest rate at which 99 % of all requests are within the SLO."""

    def holds(rate: float) -> bool:
        return simulate_serving(rate=rate, requests=requests, **settings).within_slo >= _LEAST

    return largest_rate(holds, first)
