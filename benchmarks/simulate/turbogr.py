"""TurboGR's rows, each from its own baseline row; what is unpublished is swept.

Touch this only together with benchmarks/protocols/simulate.md.
"""

import itertools
from typing import Any

from benchmarks.simulate import papers
from slipstream.bench.harness import Row
from slipstream.pipeline.trace import shares
from slipstream.simulate.cluster import Cluster
from slipstream.simulate.training_simulation import simulate_training

CLOSE = 0.10
GROUPS = (2, 4, 8, 16)
LEFT_SHARES = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
DENSE_SHARES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3)
SPREADS = tuple(0.01 * step for step in range(11))
WORKERS = 128
SAMPLE_MS = tuple(0.5 * step for step in range(2, 160, 3))  # communication a sample
UNHIDDEN = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4)


def _simulated(
    schedule: str, phases: dict[str, Any], *, groups: int = 1, spread: float = 0.0
) -> Any:
    cluster = Cluster.model_validate({"phases": phases, "spread": {"compute": spread}})
    return simulate_training(cluster, schedule, workers=WORKERS, replicas=groups, steps=16)


def _nearest(
    figure: str, printed: float, sweep: list[tuple[str, float]], part: str = "turbogr"
) -> Row:
    """Return the place of a sweep that comes nearest to the printed figure."""
    errors = [(abs(value / printed - 1), where, value) for where, value in sweep]
    error, where, value = min(errors)
    return {
        "variant": figure,
        "part": part,
        "printed": printed,
        "nearest": value,
        "error": value / printed - 1,
        "where": where,
        "lowest": min(value for _, value in sweep),
        "highest": max(value for _, value in sweep),
        "places": len(sweep),
        "places_within": sum(one <= CLOSE for one, _, _ in errors),
        "within_10": error <= CLOSE,
        "samples": [[place, found] for place, found in sweep],
    }


def hsp_rows() -> list[Row]:
    """Return all-to-all, communication and step with groups, and where all three agree."""
    base, wanted = papers.HSP_BASE, papers.HSP
    other = base.communication - base.all_to_all
    found: dict[str, list[tuple[str, float]]] = {"all-to-all": [], "communication": [], "step": []}
    together = []
    for groups, left in itertools.product(GROUPS, LEFT_SHARES):
        between = left * base.all_to_all / 2
        phases = {
            "compute": base.step - base.communication,
            "exchange": base.all_to_all,
            "between_groups": between,
            "dense": other,
        }
        step = 1e3 * _simulated("serial", phases, groups=groups).step_seconds
        within = base.all_to_all / groups
        values = {
            "all-to-all": within,
            "communication": within + (groups - 1) * between + other,
            "step": step,
        }
        where = f"{groups} groups, {left:g} of the gradients left"
        for name, value in values.items():
            found[name].append((where, value))
        printed = (wanted.all_to_all, wanted.communication, wanted.step)
        worst = max(
            abs(value / one - 1) for value, one in zip(values.values(), printed, strict=True)
        )
        together.append((worst, where))
    rows = [
        _nearest("HSP: all-to-all ms", wanted.all_to_all, found["all-to-all"]),
        _nearest("HSP: communication ms", wanted.communication, found["communication"]),
        _nearest("HSP: step ms", wanted.step, found["step"]),
    ]
    worst, where = min(together)
    for row in rows:
        row["together"] = f"{where}: all three within {100 * worst:.1f} %"
    return rows


def semi_async_row() -> Row:
    """Return the exposed share of sparse communication under `semi_async`."""
    sparse = papers.SEMI_ASYNC_BASE_MS
    step = sparse / papers.SEMI_ASYNC_BASE_SHARE
    sweep = []
    for dense_share, spread in itertools.product(DENSE_SHARES, SPREADS):
        dense = dense_share / (1 - dense_share) * sparse
        phases = {"compute": step - sparse - dense, "exchange": sparse, "dense": dense}
        report = _simulated("semi_async", phases, spread=spread)
        last = max(each.step for each in report.intervals if each.stage == "update")
        told = shares(report.intervals, 6, last)
        where = f"dense {dense_share:g}, spread {spread:g}"
        sweep.append((where, told["exposed_sparse_comm"]))
    return _nearest("semi-asynchronous: exposed share", papers.SEMI_ASYNC_SHARE, sweep)


def six_stage_rows() -> list[Row]:
    """Return the share of a step that computes under `six_stage`."""
    rows = []
    for model, row in papers.SIX_STAGES.items():
        sweep = []
        for dense_share, spread in itertools.product(DENSE_SHARES, (0.0, 0.01, 0.02, 0.05)):
            phases = {
                "compute": row.compute,
                "exchange": (1 - dense_share) * row.communication,
                "dense": dense_share * row.communication,
            }
            report = _simulated("six_stage", phases, spread=spread)
            sweep.append((f"dense {dense_share:g}, spread {spread:g}", report.compute_utilisation))
        rows.append(_nearest(f"six stages, {model}: compute share", row.utilisation, sweep))
    return rows


def linearity_rows() -> list[Row]:
    """Return every model's linearity at the place of the sweep where most are within 10 %."""
    large = papers.LINEARITY["FuXi-large"]
    step = papers.DEVICES * papers.BATCH_LARGE / large.samples_per_second
    peak = large.teraflops / (step * large.mfu)
    seconds = {name: row.teraflops / (row.mfu * peak) for name, row in papers.LINEARITY.items()}
    samples = {
        name: row.samples_per_second * seconds[name] / papers.DEVICES
        for name, row in papers.LINEARITY.items()
    }

    def predicted(name: str, sample_ms: float, unhidden: float) -> float:
        row = papers.LINEARITY[name]
        alone = row.linearity * seconds[name]  # the model's time at the base
        longer = 2 if name.endswith("long") else 1
        exchange = 1e-3 * sample_ms * samples[name] * longer
        return alone / (max(alone, exchange) + unhidden * exchange)

    def errors(place: tuple[float, float]) -> list[float]:
        return [
            abs(predicted(name, *place) / row.linearity - 1)
            for name, row in papers.LINEARITY.items()
        ]

    places = list(itertools.product(SAMPLE_MS, UNHIDDEN))
    best = min(
        places, key=lambda place: (-sum(e <= CLOSE for e in errors(place)), sum(errors(place)))
    )
    where = f"{best[0]:g} ms of communication a sample, {best[1]:g} of it not hidden"
    rows: list[Row] = []
    for name, row in papers.LINEARITY.items():
        value = predicted(name, *best)
        rows.append(
            {
                "variant": f"linearity, {name}",
                "part": "turbogr",
                "printed": row.linearity,
                "nearest": value,
                "error": value / row.linearity - 1,
                "where": where,
                "places": len(places),
                "within_10": abs(value / row.linearity - 1) <= CLOSE,
            }
        )
    return rows


def turbogr_rows() -> list[Row]:
    """Return all rows."""
    return [*hsp_rows(), semi_async_row(), *six_stage_rows(), *linearity_rows()]
