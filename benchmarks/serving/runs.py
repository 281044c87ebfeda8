"""One run of the serving benchmark, and the journal that keeps every run.

A run is named by what it measures; the journal returns a run that was made before instead of making
it again. So the same command goes on where it was stopped. Touch this when a run keeps something
else.
"""

import asyncio
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import uvloop

from benchmarks.machine_pauses import PauseWitness
from benchmarks.served import ServedProcess
from benchmarks.serving.load import Cascade, Kept, Outcome, loadgen_server, open_loop
from benchmarks.serving.server import (
    FIRST_REQUESTS,
    CoreShares,
    Deployment,
    Variant,
    wait_until_idle,
)
from benchmarks.serving.trace import Log, Window, rotating_window, session_window, single_window
from benchmarks.serving.users import Population
from slipstream.bench.harness import commit
from slipstream.history.user_history import History, join_histories
from slipstream.serving.engine.engine import Engine

Kind = Literal["probe", "verdict", "ablation", "service", "recommend"]
DISTURBED, STOLEN = 0.05, 0.01  # share of the cores that others may take; that a hypervisor may
PAUSED = 0.04  # seconds for which the whole machine may stand still, half the limit of a request
SERVICE_ATTEMPTS = 5  # for each attempt of another run: a closed loop takes a second
SETTLE_SECONDS = 0.3  # a router knows its instances' counters a quarter of a second late
Row = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """How much is measured: requests of each kind of run."""

    probe: int = 300
    verdict: int = 1_010
    ablation: int = 600
    service: int = 60
    lead_in: int = 40  # requests at the run's rate that do not count
    attempts: int = 5  # how often a run that others disturb is made
    climb: int = 20  # levels above the first one that a search tries
    most_rate: float = 1e9  # where a search begins at most

    def requests(self, kind: Kind) -> int:
        """Return how many requests of a run count."""
        sizes = {"verdict": self.verdict, "ablation": self.ablation, "service": self.service}
        return sizes.get(kind, self.probe)


@dataclass(frozen=True)
class RunPlan:
    """What one run measures."""

    variant: Variant
    population: Population
    trace: str  # S, N, or C: a circle of users
    rate: float
    kind: Kind
    number: int = 1
    candidates: int = 100
    flags: tuple[str, ...] = ()
    label: str = ""  # of the variant, where flags change it

    @property
    def key(self) -> str:
        """Its name in the journal."""
        label = self.label or self.variant.name
        return (
            f"{self.kind} {self.number}: {label} {self.trace} {self.population.name} "
            f"{self.candidates} candidates {self.rate:.3f}/s"
        )


class Journal:
    """Rows of runs by key, one JSON object a line, written as soon as a run has ended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[str, Row] = {}
        if path.is_file():
            for line in path.read_text().splitlines():
                try:
                    row = json.loads(line)
                except ValueError:
                    continue  # the last line of a run that was killed while it was written
                self.rows[row["key"]] = row

    def add(self, row: Row) -> None:
        """Keep a row, surely."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.rows[row["key"]] = row


class Runner:
    """Makes runs, or takes them from the journal."""

    def __init__(
        self,
        deployment: Deployment,
        journal: Journal,
        logs: Sequence[Log],
        engine: Callable[[bool], Engine],
        *,
        slo: float,
        sizes: Sizes,
        kept_bytes: int,
        witness: PauseWitness,
        log: Callable[[str], None],
    ) -> None:
        self.deployment, self.journal, self.logs, self._engine = deployment, journal, logs, engine
        self._witness, self._commit = witness, commit()
        self.slo, self.sizes, self.kept_bytes, self._log = slo, sizes, kept_bytes, log

    def run(self, plan: RunPlan) -> Row:
        """Return the row of a run."""
        if plan.key not in self.journal.rows:
            self._make(plan)
        return self.journal.rows[plan.key]

    def _make(self, plan: RunPlan) -> None:
        """Make a run; one that others disturbed is kept under another key and made again."""
        attempts = self.sizes.attempts * (SERVICE_ATTEMPTS if plan.kind == "service" else 1)
        for attempt in range(1, attempts + 1):
            begin, final = time.monotonic(), attempt == attempts
            row = self._service(plan) if plan.kind == "service" else self._load(plan, final)
            row["seconds"] = round(time.monotonic() - begin, 1)
            last = final or is_calm(row, plan.rate, self.sizes.requests(plan.kind))
            key = plan.key if last else f"{plan.key}, disturbed {attempt}"
            self.journal.add({"key": key, "commit": self._commit, **_named(plan), **row})
            self._log(describe(self.journal.rows[key]))
            if last:
                return

    def known(self, plan: RunPlan) -> bool:
        """Return whether a run is in the journal."""
        return plan.key in self.journal.rows

    def kept_prefixes(self, population: Population) -> float:
        """Return how many prefixes of these users both tiers of all instances hold."""
        return self.kept_bytes / self._engine(False).prefix_bytes(round(population.mean_length))

    def window(self, plan: RunPlan, count: int, seed: int) -> Window:
        """Return the requests of a run's trace."""
        if plan.trace == "N":
            return single_window(count)
        if plan.trace == "C":
            return rotating_window(count, plan.population.users)
        kept = self.kept_prefixes(plan.population)
        return session_window(self.logs, plan.rate, count, kept=kept, seed=seed)

    def _cascade(self, plan: RunPlan, window: Window, seed: int) -> tuple[Cascade, ServedProcess]:
        started = self.deployment.started
        server, first = self.deployment.users(
            plan.variant, plan.population, window.users, plan.flags
        )
        if self.deployment.started > started:
            self._first_requests(plan, server)
        return self._cascade_of(plan, server, first, window, seed), server

    def _first_requests(self, plan: RunPlan, server: ServedProcess) -> None:
        """Ask a new server a few times, and wait until what that begins in it is done."""
        users, window = plan.population.users, single_window(FIRST_REQUESTS)
        cascade = self._cascade_of(plan, server, users - FIRST_REQUESTS, window, 0)

        async def ask() -> None:
            await cascade.closed_loop(FIRST_REQUESTS // 2, FIRST_REQUESTS)
            cascade.close()

        uvloop.run(ask())
        wait_until_idle(server)

    def _cascade_of(
        self, plan: RunPlan, server: ServedProcess, first: int, window: Window, seed: int
    ) -> Cascade:
        return Cascade(
            server.url,
            plan.population,
            first,
            window,
            Outcome(plan.rate, self.slo),
            candidates=plan.candidates,
            preinfer=plan.variant.preinfer,
            seed=seed,
        )

    def _service(self, plan: RunPlan) -> Row:
        """Measure service times in a closed loop with a client for each instance."""
        count = self.sizes.service
        warm = max(4, count // 6)
        window = single_window(count + warm)
        cascade, server = self._cascade(plan, window, 0)
        cores, begin = CoreShares(server), time.monotonic()

        async def measure() -> list[dict[str, float]]:
            taken = await cascade.closed_loop(plan.variant.instances, count + warm)
            cascade.close()
            return taken[warm:]

        taken = uvloop.run(measure())
        columns = {name: [each[name] for each in taken] for name in taken[0]}
        row: Row = {f"{name}_ms": 1e3 * float(np.median(times)) for name, times in columns.items()}
        shares = cores.shares()
        row |= {"others_share": shares["others"], "stolen_share": shares["stolen"]}
        row |= self._pauses(begin)
        return {**row, "samples": {f"{name}_s": times for name, times in columns.items()}}

    def _pauses(self, since: float) -> Row:
        pauses = self._witness.since(since)
        return {
            "longest_pause_ms": 1e3 * max(pauses, default=0.0) if self._witness.watching else None,
            "paused_ms": 1e3 * sum(pauses),
            "paused_beyond_ms": 1e3 * sum(max(0.0, each - PAUSED) for each in pauses),
        }

    def _load(self, plan: RunPlan, final: bool) -> Row:
        sizes, seed = self.sizes, plan.number
        count = sizes.requests(plan.kind)
        window = self.window(plan, count + sizes.lead_in, seed)
        cascade, server = self._cascade(plan, window, seed)
        row = uvloop.run(self._drive(plan, cascade, server, count, seed, final))
        row["score_diff"] = self._largest_difference(plan, cascade.outcome.kept)
        return row

    async def _drive(
        self,
        plan: RunPlan,
        cascade: Cascade,
        server: ServedProcess,
        count: int,
        seed: int,
        final: bool,
    ) -> Row:
        """Drive one run; one that the machine pauses ends there, unless it is the final try."""
        lead_in, outcome = self.sizes.lead_in, cascade.outcome
        if plan.variant.keeps:
            await cascade.warm_up(plan.variant.instances)
        cascade.outcome = Outcome(plan.rate, self.slo)
        asks = plan.kind == "recommend"
        await open_loop(cascade, range(lead_in), give_up=False, seed=seed + 1_000, recommend=asks)
        await asyncio.sleep(SETTLE_SECONDS)
        before = await cascade.metrics()
        cores, cascade.outcome, begin = CoreShares(server), outcome, time.monotonic()
        places = range(lead_in, lead_in + count)
        if plan.kind == "verdict":
            await loadgen_server(cascade, places, seed=seed)
        else:
            await open_loop(
                cascade,
                places,
                give_up=plan.kind == "probe",
                seed=seed,
                recommend=asks,
                disturbed=lambda: (
                    not final and max(self._witness.since(begin), default=0.0) > PAUSED
                ),
            )
        shares, pauses = cores.shares(), self._pauses(begin)
        await asyncio.sleep(SETTLE_SECONDS)
        after = await cascade.metrics()
        cascade.close()
        change = {name: after[name] - before.get(name, 0.0) for name in after if _counts(name)}
        return outcome_row(outcome, change, shares) | pauses

    def _largest_difference(self, plan: RunPlan, kept: Sequence[Kept]) -> float:
        """Compare answers with the full pass without a cache."""
        engine, largest = self._engine(plan.variant.truncated), 0.0
        for each in kept:
            history = served_history(plan.population, each.user, each.pages)
            history = history.part(max(0, history.total - engine.rules.max_len), history.total)
            if each.answer.behaviours != len(history):
                continue  # ranked before its last behaviours were stored
            full = engine.rank(None, history, each.answer.items)
            for task, scores in full.items():
                served = np.array(each.answer.scores[task], np.float32)
                largest = max(largest, float(np.abs(served - scores).max()))
        return largest


def is_calm(row: Row, rate: float, requests: int) -> bool:
    """Return whether nothing but the benchmark itself had a part in a run."""
    if row["others_share"] > DISTURBED or row["stolen_share"] > STOLEN:
        return False
    return not is_paused(row, rate, requests)


def is_paused(row: Row, rate: float, requests: int) -> bool:
    """Return whether pauses may have cost half of the misses that a 99th percentile allows.

    Service times, which have no rate, allow none.
    """
    beyond: float = row["paused_beyond_ms"]
    return rate * beyond / 1e3 > 0.005 * requests if rate else beyond > 0.0


def inline_share(row: Row) -> float:
    """Return the share of a run's answers that were ranked in line."""
    hits: dict[str, int] = row["samples"]["hits"]
    return hits.get("inline", 0) / max(1, sum(hits.values()))


def served_history(population: Population, user: int, pages: int) -> History:
    """Return what is stored of a user who has asked for so many pages before."""
    parts = [population.history_of(user)]
    for page in range(1, pages + 1):
        added = population.appended_by(user, page)
        parts.append(History(added.items, added.timestamps, added.actions, first=parts[-1].total))
    return join_histories(parts)


def outcome_row(outcome: Outcome, change: dict[str, float], shares: dict[str, float]) -> Row:
    """Return what is kept of a run."""
    lag = sorted(outcome.lags)
    return {
        "requests": len(outcome.latencies),
        "misses": outcome.misses,
        "p50_ms": _finite(outcome.percentile(0.5)),
        "p99_ms": _finite(outcome.percentile(0.99)),
        "within_slo": outcome.within_slo,
        "holds": outcome.holds,
        "verdict": outcome.verdict,
        "computed_share": change.get("prefixes_computed", 0.0) / max(1, len(outcome.latencies)),
        "generator_share": shares["generator"],
        "router_share": shares["router"],
        "instances_share": shares["instances"],
        "others_share": shares["others"],
        "stolen_share": shares["stolen"],
        "generator_lag_ms": 1e3 * lag[int(0.99 * (len(lag) - 1))] if lag else 0.0,
        "samples": {
            "latencies_ms": [
                round(1e3 * latency, 2) if math.isfinite(latency) else None
                for latency in outcome.latencies
            ],
            "hits": dict(outcome.hits),
            "announced": dict(outcome.announced),
            "errors": dict(outcome.errors),
            "counters": {name: round(value, 4) for name, value in change.items() if value},
        },
    }


def describe(row: Row) -> str:
    """Return a run in one line."""
    if row["kind"] == "service":
        times = ", ".join(
            f"{name.removesuffix('_ms')} {row[name]:.1f} ms"
            for name in ("rank_ms", "hit_ms")
            if name in row
        )
        return f"{row['key']}: {times}, others {row['others_share']:.0%} of the cores"
    hits = "/".join(f"{name} {count}" for name, count in row["samples"]["hits"].items())
    p99 = "none" if row["p99_ms"] is None else f"{row['p99_ms']:.1f} ms"
    end = row["verdict"] or ("holds" if row["holds"] else "does not hold")
    return (
        f"{row['key']}: {end}; {row['misses']} of {row['requests']} missed, p99 {p99}, {hits}, "
        f"generator {row['generator_share']:.0%} of the cores, router {row['router_share']:.0%}, "
        f"instances {row['instances_share']:.0%}, others {row['others_share']:.0%}, stolen "
        f"{row['stolen_share']:.1%}, longest pause {row['longest_pause_ms'] or 0:.0f} ms"
    )


def _named(plan: RunPlan) -> Row:
    return {
        "variant": plan.label or plan.variant.name,
        "trace": plan.trace,
        "length": plan.population.name,
        "candidates": plan.candidates,
        "kind": plan.kind,
        "number": plan.number,
        "rate": plan.rate,
    }


def _counts(name: str) -> bool:
    """Return whether a figure counts something, and is not a state."""
    states = ("bytes", "entries", "queue_", "cost_factor", "outstanding", "ready", "in_flight")
    return not any(word in name for word in states)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
