"""Simulated rates against those of the serving benchmark, where its result is recorded.

What a request takes is calibrated on few of its runs and on the idle engine; then its own search
goes over simulated runs, which replay the arrivals of the recorded ones
(benchmarks/protocols/simulate.md). Touch this when the serving benchmark records something else.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

import numpy as np

from benchmarks.evidence import RESULTS, read_result
from benchmarks.serving.load import LONGEST_STAGE, STAGE_MEAN, STAGE_VARIATION
from benchmarks.serving.runs import RunPlan, Sizes
from benchmarks.serving.search import Question, RateSearch
from benchmarks.serving.server import VARIANTS
from benchmarks.serving.trace import poisson_times, stage_times
from benchmarks.serving.users import Population
from slipstream.bench.harness import Row, note
from slipstream.serving.instance.cost_model import non_negative_fit
from slipstream.serving.instance.instance_config import InstanceConfig
from slipstream.simulate.serving_simulation import simulate_serving
from slipstream.simulate.shared_cores import CallCosts
from slipstream.simulate.simulated_engine import EngineSpec
from slipstream.simulate.traffic import Arrivals, Traffic, draw_arrivals
from slipstream.simulate.workload import LengthLaw

RESULT: Path = RESULTS / "serving.json"
TOKENS, HELD, CANDIDATES = 2, 8, 100  # of a behaviour; held back by a prefix; of a request
CALIBRATES = ("384", "1024")  # lengths of trace S
COMPARED = ("relay", "W1")
SEEDS, QUICK_SEEDS = 5, 1
SLO = 0.08
MISSES = 3  # of 1,010, with which LoadGen calls a run VALID
DEVICE_BYTES, HOST_BYTES = 1 << 30, 4 << 30
LEAD_IN = Sizes.lead_in
Runs = list[dict[str, Any]]


@dataclass(frozen=True)
class Calibration:
    """What a request takes: processor time of each process, and the passes of the engine."""

    calls: CallCosts
    spec: EngineSpec


def calibrate(runs: Runs, hit_rows: Sequence[Row], cores: int) -> Calibration:
    """Return what the calibrating runs and the idle engine tell."""
    probes = [_first(runs, "probe", length) for length in CALIBRATES]
    times = [_first(runs, "service", length)["samples"]["rank_s"] for length in CALIBRATES]

    def spent(role: str, less: str = "") -> float:
        """Return seconds of a core a request, the mean of the calibrating lengths."""
        found = []
        for run in probes:
            whole = run[f"{role}_share"] * cores * probe_seconds(run)
            whole -= run["samples"]["counters"][less] if less else 0.0
            found.append(max(0.0, whole / run["requests"]))
        return fmean(found)

    calls = CallCosts(
        cores=cores,
        client_seconds=spent("generator"),
        router_seconds=spent("router"),
        instance_seconds=spent("instances", less="busy_seconds"),
    )
    besides = calls.client_seconds + calls.router_seconds + calls.instance_seconds
    spreads = [pstdev(np.log(seconds).tolist()) for seconds in times]
    spec = EngineSpec(
        coefficients=_coefficients([median(each) - besides for each in times], hit_rows),
        jitter=min(1.0, fmean(spreads)),
        tokens_per_behaviour=TOKENS,
    )
    return Calibration(calls, spec)


def probe_seconds(run: dict[str, Any]) -> float:
    """Return how long a probe took, from its start to its last answer."""
    count, seed = run["requests"], run["number"]
    stages = stage_times(STAGE_MEAN, STAGE_VARIATION, LONGEST_STAGE, count + LEAD_IN, seed)
    due = poisson_times(run["rate"], count, seed) + stages[LEAD_IN:]
    return 0.05 + float(due.max()) + run["p50_ms"] / 1e3


def loadgen_times(rate: float, count: int, seed: int) -> np.ndarray:
    """Return when LoadGen's Server scenario sends its queries: exponential gaps of mt19937(seed).

    The standard library of C++ makes a number of 53 bits from two draws.
    """
    drawn_N2 = np.random.RandomState(seed).randint(0, 1 << 32, size=(count, 2), dtype=np.uint64)
    uniform_N = (drawn_N2[:, 0] + drawn_N2[:, 1] * 2.0**32) / 2.0**64
    gaps_N = -np.log1p(-uniform_N) / rate
    return np.concatenate([[0.0], np.cumsum(gaps_N[:-1])])


def replayed(plan: RunPlan, count: int, drawn: Arrivals) -> Arrivals:
    """Return drawn requests with the arrivals and stages of the recorded run of this name."""
    times = loadgen_times if plan.kind == "verdict" else poisson_times
    stages = stage_times(STAGE_MEAN, STAGE_VARIATION, LONGEST_STAGE, count + LEAD_IN, plan.number)
    at_R = times(plan.rate, count, plan.number)
    return replace(drawn, at_R=at_R, before_R=stages[LEAD_IN:])


def _first(runs: Runs, kind: str, length: str) -> dict[str, Any]:
    """Return the first run of a kind of W1 on S."""
    return next(
        run
        for run in runs
        if (run["kind"], run["variant"], run["trace"], run["length"]) == (kind, "W1", "S", length)
    )


def _coefficients(
    seconds: Sequence[float], hit_rows: Sequence[Row]
) -> tuple[float, float, float, float]:
    """Return a, b, c and d: c and d from the idle engine, a and b from the two lengths' passes."""
    alone = {(row["variant"], row["behaviours"]): row["ms"] / 1e3 for row in hit_rows}

    def of(variant: str) -> tuple[np.ndarray, np.ndarray]:
        found = sorted(
            (length, taken) for (name, length), taken in alone.items() if name == variant
        )
        lengths, taken = np.array(found).T
        return TOKENS * lengths, taken

    history_N, taken_N = of("engine in line")
    new_N = history_N + CANDIDATES
    x_NF = np.stack([np.ones_like(new_N), new_N, new_N**2 / 2], axis=1)
    pair = float(non_negative_fit(x_NF, taken_N)[2])
    cached_N, taken_N = of("engine hit")
    slope = float(np.polyfit(cached_N, taken_N, 1)[0])
    new = np.array([TOKENS * int(length) + CANDIDATES for length in CALIBRATES], float)
    rest = np.array(seconds) - pair * new**2 / 2
    token = max(0.0, float((rest[1] - rest[0]) / (new[1] - new[0])))
    call = max(0.0, float((rest - token * new).mean()))
    return call, token, pair, max(0.0, slope - pair * (HELD + CANDIDATES))


class SimulatedRunner:
    """Makes the runs of a search in virtual time; service times are the recorded ones."""

    def __init__(
        self, runs: Runs, found: Calibration, returning: float, sizes: Sizes, seed: int
    ) -> None:
        self.runs, self.found, self.returning = runs, found, returning
        self.sizes, self.seed, self.slo = sizes, seed, SLO

    def run(self, plan: RunPlan) -> Row:
        """Return the row of a run, as far as the search reads it."""
        name = plan.variant.name
        if plan.kind == "service":
            asked = ("service", name, plan.trace, plan.population.name)
            return next(
                run
                for run in self.runs
                if (run["kind"], run["variant"], run["trace"], run["length"]) == asked
                and "disturbed" not in run.get("key", "")
            )
        count = self.sizes.requests(plan.kind)
        traffic = _traffic(plan, count, self.returning)
        report = simulate_serving(
            instances=plan.variant.instances,
            rate=plan.rate,
            requests=count,
            slo_ms=1e3 * SLO,
            spec=self.found.spec,
            calls=self.found.calls,
            http_ms=0.0,
            traffic=traffic,
            arrivals=replayed(plan, count, draw_arrivals(traffic, self.seed)),
            config=InstanceConfig(
                relay=plan.variant.keeps,
                device_bytes=DEVICE_BYTES,
                host_bytes=HOST_BYTES,
                host_path="simulated",
            ),
            seed=10_000 * self.seed + 100 * plan.number + (plan.kind == "verdict"),
        )
        misses = round((1.0 - report.within_slo) * count)
        valid = misses <= MISSES * count // Sizes.verdict
        return {"holds": misses <= count // 100, "verdict": "VALID" if valid else "INVALID"}


def simulated_rate(runner: SimulatedRunner, variant: str, trace: str, length: str) -> float:
    """Return the rate that the recorded search finds with simulated runs; 0: none."""
    question = Question(Population(length, 1, 1, int(length)), trace)
    search = RateSearch(runner, question, [VARIANTS[variant]])  # type: ignore[arg-type]
    return search.rates()[variant] or 0.0


def serving_rows(quick: bool = False) -> tuple[list[Row], dict[str, float]]:
    """Return a row per trace, length and variant: the recorded and the simulated rate."""
    content = read_result("serving")
    samples = content["rows"][0]["samples"]
    runs: Runs = samples["runs"]
    figures = samples["figures"]
    found = calibrate(runs, figures["hit"]["rows"], content["machine"]["cores"])
    sizes = Sizes(probe=150, verdict=300) if quick else Sizes()
    rows: list[Row] = []
    for label, group in figures["groups"].items():
        trace, _, length = label.partition(" ")
        for variant in COMPARED:
            recorded = group["rates"].get(variant)
            if not recorded or not length.isdigit():
                continue
            note(f"simulated searches of {variant}, {label}")
            rates = [
                simulated_rate(
                    SimulatedRunner(runs, found, group["returning"], sizes, seed),
                    variant,
                    trace,
                    length,
                )
                for seed in range(QUICK_SEEDS if quick else SEEDS)
            ]
            simulated = median(rates)
            calibrates = trace == "S" and length in CALIBRATES and variant == "W1"
            rows.append(
                {
                    "variant": f"{label}: {variant}" + " (calibrates)" * calibrates,
                    "part": "serving",
                    "recorded": recorded,
                    "simulated": simulated,
                    "error": simulated / recorded - 1,
                    "calibrates": calibrates,
                    "samples": rates,
                }
            )
    if not rows:
        return [], {}
    errors = [abs(row["error"]) for row in rows]
    return rows, {
        "reality_error_slo": max(errors),
        "reality_error_slo_median": median(errors),
        "reality_rates": float(len(rows)),
        "reality_rates_within_20": float(sum(error <= 0.2 for error in errors)),
    }


def _traffic(plan: RunPlan, count: int, returning: float) -> Traffic:
    """Return the traffic of a run: users of one length, of whose requests a share returns."""
    length = float(plan.population.length)
    return Traffic(
        rate=plan.rate,
        requests=count,
        lengths=LengthLaw(median=length, sigma=0.0, shortest=1, longest=6144),
        pages=1.0 / max(0.02, 1.0 - returning),
        gap_seconds=5.0,
        gap_sigma=0.5,
    )
