"""The planner: from demand and a device to a mesh, a schedule, instances, memory and cost.

    plan = make_plan(Demand(requests_per_second=2000, events_per_second=50_000), "accelerators")
    plan.training.workers, plan.serving.instances, plan.reasons

It tries meshes and schedules on the training simulator and instance counts on the serving
simulator; nothing is looked up in a table. Touch this when a plan decides something else.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from slipstream.errors import SlipstreamError
from slipstream.models.flops import backbone_flops
from slipstream.pipeline.adaptive import CANDIDATES
from slipstream.pipeline.schedule import make_schedule
from slipstream.serving.instance.instance_config import InstanceConfig
from slipstream.simulate.cluster import Cluster, open_cluster
from slipstream.simulate.serving_simulation import ServingReport, simulate_serving
from slipstream.simulate.shared_cores import CallCosts
from slipstream.simulate.simulated_engine import EngineSpec, SimulatedEngine
from slipstream.simulate.training_simulation import TrainingReport, simulate_training
from slipstream.simulate.workload import LengthLaw, Workload

_HELD = 0.99  # share of requests within the SLO
_STEPS = 4  # simulated for each candidate
_BUSY = 0.6  # share of compute time from which instances are first guessed
_FREE = 0.9  # share of a memory that a plan fills
MOST_WORKERS = 4096  # that a plan tries


class Demand(BaseModel):
    """What is asked of the system."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    requests_per_second: float = Field(default=100.0, gt=0, le=1e6)
    events_per_second: float = Field(
        default=10_000.0, gt=0, description="behaviours a second that training must keep up with"
    )
    slo_ms: float = Field(default=80.0, gt=0, description="99th percentile of the ranking stage")
    table_rows: int | None = Field(default=None, ge=1, description="None: the workload's items")
    history: float = Field(default=1024.0, gt=0, description="median behaviours of a user")
    history_sigma: float = Field(default=0.5, ge=0, le=3)
    candidates: int = Field(default=100, ge=1, le=10_000)
    pages: float = Field(default=8.0, ge=1, description="requests of a session")
    gap_seconds: float = Field(default=40.0, gt=0, description="between two of them")


@dataclass(frozen=True)
class TrainingPlan:
    """Devices that train, and how."""

    workers: int
    shards: int
    replicas: int
    schedule: str
    micro_batches: int
    buffers_ahead: int
    step_ms: float
    events_per_second: float
    table_gb: float  # of one device's share of its host
    buffer_gb: float  # of one device
    dollars_per_hour: float


@dataclass(frozen=True)
class ServingPlan:
    """Instances that serve, and their memory."""

    instances: int
    device_cache_gb: float
    host_cache_gb: float
    prefix_mb: float
    within_slo: float
    p99_ms: float
    busy: float
    dollars_per_hour: float


@dataclass(frozen=True)
class Plan:
    """What to set up, why, and what changes it."""

    training: TrainingPlan
    serving: ServingPlan
    reasons: list[str]
    sensitivity: list[dict[str, Any]]

    @property
    def dollars_per_hour(self) -> float:
        """The cost of all devices."""
        return self.training.dollars_per_hour + self.serving.dollars_per_hour

    def row(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return asdict(self) | {"dollars_per_hour": self.dollars_per_hour}


def make_plan(
    demand: Demand | dict[str, Any],
    cluster: Cluster | str | Path | dict[str, Any] = "accelerators",
    *,
    requests: int = 2_000,
    sensitivity: bool = True,
    seed: int = 0,
) -> Plan:
    """Plan training and serving for a demand on devices like those of a cluster file."""
    asked = demand if isinstance(demand, Demand) else Demand.model_validate(demand)
    place = _with_rows(open_cluster(cluster), asked)
    training, why = plan_training(asked, place, seed)
    serving, how = plan_serving(asked, place, requests, seed)
    varied = _vary(asked, place, requests, seed, training, serving) if sensitivity else []
    return Plan(training, serving, [*why, *how], varied)


def _with_rows(cluster: Cluster, demand: Demand) -> Cluster:
    if cluster.workload is None:
        raise SlipstreamError(
            f"cluster '{cluster.name}' gives times and no workload, but a plan needs the model and "
            "the devices; copy the shipped cluster file 'accelerators' and change it"
        )
    if demand.table_rows is None:
        return cluster
    work = cluster.workload.model_copy(update={"items": demand.table_rows, "store": None})
    return cluster.model_copy(update={"workload": work})


# ---- training -----------------------------------------------------------------------------------


def plan_training(
    demand: Demand, cluster: Cluster, seed: int = 0
) -> tuple[TrainingPlan, list[str]]:
    """Return the smallest number of workers that holds the tables and keeps up, and why."""
    work = cluster.workload
    assert work is not None
    tokens = work.tokens / work.samples
    for workers in _worker_counts(cluster):
        if not _meshes(cluster, work, workers):
            continue
        best = _best_schedule(cluster, work, workers, seed)
        if best.samples_per_second * tokens >= demand.events_per_second:
            return _training_plan(cluster, work, best, tokens, demand)
    raise SlipstreamError(
        f"{MOST_WORKERS:,} workers of '{cluster.name}' do not keep up with "
        f"{demand.events_per_second:,.0f} events a second, or do not hold the tables; describe "
        "faster devices or links, or larger hosts"
    )


def _worker_counts(cluster: Cluster) -> list[int]:
    """Return the numbers of workers that are tried: within a node, then whole nodes doubled."""
    node = cluster.devices_per_node
    counts = [n for n in (1, 2, 4) if n < node]
    while node <= MOST_WORKERS:
        counts.append(node)
        node *= 2
    return counts


def _table_bytes(work: Workload) -> float:
    return float(work.rows) * (work.row_bytes + work.state_bytes)


def _buffer_bytes(work: Workload, shards: int, replicas: int, ahead: int) -> float:
    """Return the bytes of a device's row buffers: the active one and those filled ahead."""
    touched = work.keys(shards * replicas) / shards
    return (ahead + 1) * touched * (work.row_bytes + work.state_bytes)


def _meshes(cluster: Cluster, work: Workload, workers: int) -> list[int]:
    """Return the numbers of replicas whose tables and buffers fit."""
    host, device = cluster.host.memory_gb * 1e9, cluster.device.memory_gb * 1e9
    found = []
    for replicas in (1, 2, 4, 8):
        if workers % replicas or workers < replicas:
            continue
        shards = workers // replicas
        fits = _table_bytes(work) / shards <= _FREE * host
        if fits and _buffer_bytes(work, shards, replicas, 2) <= 0.5 * device:
            found.append(replicas)
    return found


def _best_schedule(cluster: Cluster, work: Workload, workers: int, seed: int) -> TrainingReport:
    """Simulate every mesh, schedule and cut, and return the fastest."""
    settings: dict[str, Any] = {"workers": workers, "steps": _STEPS, "seed": seed}
    found: list[TrainingReport] = []
    for replicas in _meshes(cluster, work, workers):
        for name, cuts in (("serial", (1,)), ("dual_buffer", (1,)), ("nested", CANDIDATES[1:])):
            for parts in cuts:
                schedule = make_schedule(name, micro_batches=parts)
                found.append(simulate_training(cluster, schedule, replicas=replicas, **settings))
    best = min(found, key=lambda report: (report.step_seconds, report.micro_batches))
    if best.buffers_ahead:
        deeper = make_schedule(best.schedule, micro_batches=best.micro_batches, buffers_ahead=2)
        again = simulate_training(cluster, deeper, replicas=best.replicas, **settings)
        if again.step_seconds < 0.99 * best.step_seconds:
            best = again
    return best


def _training_plan(
    cluster: Cluster, work: Workload, best: TrainingReport, tokens: float, demand: Demand
) -> tuple[TrainingPlan, list[str]]:
    table = _table_bytes(work)
    plan = TrainingPlan(
        workers=best.workers,
        shards=best.shards,
        replicas=best.replicas,
        schedule=best.schedule,
        micro_batches=best.micro_batches,
        buffers_ahead=best.buffers_ahead,
        step_ms=1e3 * best.step_seconds,
        events_per_second=best.samples_per_second * tokens,
        table_gb=table / best.shards / 1e9,
        buffer_gb=_buffer_bytes(work, best.shards, best.replicas, best.buffers_ahead) / 1e9,
        dollars_per_hour=best.workers * cluster.device.dollars_per_hour,
    )
    reasons = [
        f"tables: {work.rows:,} rows x {work.row_bytes + work.state_bytes} bytes = "
        f"{table / 1e9:,.1f} GB; a shard of {plan.table_gb:,.1f} GB lies in the "
        f"{cluster.host.memory_gb:,.0f} GB of a device's host",
        f"workers: {plan.workers} train {plan.events_per_second:,.0f} events a second, "
        f"{demand.events_per_second:,.0f} are asked for; the next smaller number does not keep up "
        "or does not hold the tables",
        f"schedule: {plan.schedule} with {plan.micro_batches} micro-batches on "
        f"{plan.shards}x{plan.replicas} was the fastest simulated: {plan.step_ms:,.1f} ms a step, "
        f"{100 * best.compute_utilisation:.0f} % of it compute, lookups "
        f"{100 * best.exposed_lookup:.1f} % and communication {100 * best.exposed_comm:.1f} % "
        f"exposed; the busiest lane is {best.bound}",
    ]
    return plan, reasons


# ---- serving ------------------------------------------------------------------------------------


def device_spec(cluster: Cluster) -> EngineSpec:
    """Return what passes take on a device, from FLOPs and bytes."""
    work, device = cluster.workload, cluster.device
    assert work is not None
    model, rate = work.model, device.teraflops * 1e12 * device.efficiency
    one, two = (backbone_flops(model, [length]) for length in (1, 2))
    token, pair = 3 * one - two, (two - 2 * one) / 2  # n tokens cost n token + n (n + 1) pair
    cached = 4.0 * model.blocks * model.heads * (model.dqk + model.dv)  # bytes of a token
    return EngineSpec.model_validate(
        {
            "model": model,
            "coefficients": (
                device.call_us * 1e-6 * model.blocks,
                token / rate,
                2 * pair / rate,
                cached / (device.memory_gb_per_s * 1e9),
            ),
            "copy_seconds_per_byte": 1 / (device.host_gb_per_s * 1e9),
        }
    )


def plan_serving(
    demand: Demand, cluster: Cluster, requests: int = 2_000, seed: int = 0
) -> tuple[ServingPlan, list[str]]:
    """Return the smallest fleet that holds the SLO in simulation, and why."""
    spec = device_spec(cluster)
    longest = min(spec.model.max_len, int(4 * demand.history))
    traffic = {
        "pages": demand.pages,
        "gap_seconds": demand.gap_seconds,
        "candidates": demand.candidates,
        "lengths": LengthLaw(
            median=demand.history, sigma=demand.history_sigma, shortest=1, longest=longest
        ),
    }
    engine, cost = SimulatedEngine(spec, seed), spec.cost_model()
    behaviours = min(int(demand.history), spec.model.max_len)
    prefix = engine.prefix_bytes(behaviours)
    tokens = engine.tokens_of(behaviours)
    compute = cost.prefill_seconds(tokens) + cost.plain_seconds(demand.candidates + 8, tokens)
    calls = CallCosts(instance_seconds=cluster.host.request_us * 1e-6)

    def simulated(instances: int) -> ServingReport:
        return simulate_serving(
            instances=instances,
            rate=demand.requests_per_second,
            requests=requests,
            slo_ms=demand.slo_ms,
            spec=spec,
            traffic=traffic,
            config=_instance_config(demand, cluster, instances, prefix),
            calls=calls,
            seed=seed,
        )

    whole = compute + calls.instance_seconds
    guess = max(1, math.ceil(demand.requests_per_second * whole / _BUSY))
    report = _smallest_fleet(simulated, guess, demand)
    config = _instance_config(demand, cluster, report.instances, prefix)
    plan = ServingPlan(
        instances=report.instances,
        device_cache_gb=config.device_bytes / 1e9,
        host_cache_gb=config.host_bytes / 1e9,
        prefix_mb=prefix / 1e6,
        within_slo=report.within_slo,
        p99_ms=report.p99_ms,
        busy=report.busy,
        dollars_per_hour=report.instances * cluster.device.dollars_per_hour,
    )
    reasons = [
        f"a request computes about {1e3 * compute:.1f} ms ({behaviours} behaviours before it) and "
        f"takes {1e3 * calls.instance_seconds:.1f} ms of its instance besides; "
        f"{plan.instances} instances are the fewest that hold {demand.slo_ms:g} ms for "
        f"{100 * _HELD:.0f} % of {demand.requests_per_second:,.0f} requests a second, simulated: "
        f"{100 * plan.within_slo:.2f} % within it, p99 {plan.p99_ms:.1f} ms, threads "
        f"{100 * plan.busy:.0f} % busy",
        f"device cache: {plan.prefix_mb:.1f} MB a prefix x twice those announced and not yet used "
        f"= {plan.device_cache_gb:.2f} GB an instance",
        f"host cache: the prefixes of users between two pages ({demand.gap_seconds:g} s) = "
        f"{plan.host_cache_gb:.2f} GB an instance",
    ]
    return plan, reasons


def _instance_config(
    demand: Demand, cluster: Cluster, instances: int, prefix: int
) -> InstanceConfig:
    """Return an instance's memory by Little's law, within what a device and its host have."""
    rate = demand.requests_per_second / instances
    live = max(8.0, 2 * rate * 0.5)  # half a second from announcement to use
    returning = rate * demand.gap_seconds * (1 - 1 / demand.pages)
    device = min(live * prefix, 0.5 * cluster.device.memory_gb * 1e9)
    host = min(max(8.0, returning) * prefix, 0.5 * cluster.host.memory_gb * 1e9)
    return InstanceConfig(
        device_bytes=int(device),
        host_bytes=int(host),
        host_path="simulated",
        ranking_budget=demand.slo_ms / 1e3,
        expected_candidates=demand.candidates,
    )


def _smallest_fleet(simulated: Any, guess: int, demand: Demand) -> ServingReport:
    """Search the fewest instances that hold, from a first guess."""
    report: ServingReport = simulated(guess)
    least = 0
    while report.within_slo < _HELD:
        least, guess = guess, max(guess + 1, math.ceil(1.3 * guess))
        if guess > 10_000:
            raise SlipstreamError(
                f"10,000 instances do not hold {demand.slo_ms:g} ms; allow more time, shorter "
                "histories, or describe a faster device"
            )
        report = simulated(guess)
    while report.instances - least > max(1, report.instances // 20):
        middle = (least + report.instances) // 2
        if middle <= least:
            break
        tried: ServingReport = simulated(middle)
        if tried.within_slo >= _HELD:
            report = tried
        else:
            least = middle
    return report


# ---- sensitivity --------------------------------------------------------------------------------


def _vary(
    demand: Demand,
    cluster: Cluster,
    requests: int,
    seed: int,
    training: TrainingPlan,
    serving: ServingPlan,
) -> list[dict[str, Any]]:
    """Return how the plan changes with each input alone."""
    assert cluster.workload is not None
    slower = {
        "network": cluster.network.model_copy(update={"gb_per_s": cluster.network.gb_per_s / 2})
    }
    larger = {"workload": cluster.workload.model_copy(update={"items": 4 * cluster.workload.rows})}
    changes: Sequence[tuple[str, dict[str, Any], dict[str, Any]]] = (
        ("twice the requests", {"requests_per_second": 2 * demand.requests_per_second}, {}),
        ("histories twice as long", {"history": 2 * demand.history}, {}),
        ("half the SLO", {"slo_ms": demand.slo_ms / 2}, {}),
        ("twice the events", {"events_per_second": 2 * demand.events_per_second}, {}),
        ("half the network", {}, slower),
        ("four times the rows", {}, larger),
    )
    serves = {"requests_per_second", "history", "slo_ms"}
    rows = []
    for title, asked, changed in changes:
        other, place = demand.model_copy(update=asked), cluster.model_copy(update=changed)
        row: dict[str, Any] = {"change": title}
        try:
            served = serving
            if serves & asked.keys():
                served = plan_serving(other, place, min(requests, 1_000), seed)[0]
            trained = training if serves & asked.keys() else plan_training(other, place, seed)[0]
        except SlipstreamError as error:
            rows.append(row | {"impossible": str(error)})
            continue
        rows.append(
            row
            | {
                "workers": trained.workers,
                "step_ms": trained.step_ms,
                "instances": served.instances,
                "dollars_per_hour": trained.dollars_per_hour + served.dollars_per_hour,
            }
        )
    return rows
