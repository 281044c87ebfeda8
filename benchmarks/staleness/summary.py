"""What the finished runs of a study show: means, paired differences, and whose bits were equal.

Touch this when the study should report another figure.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.staleness.cases import Case
from benchmarks.staleness.collisions import collision_rates
from benchmarks.staleness.paired import compare, holm
from benchmarks.staleness.plan import Planned
from benchmarks.staleness.variants import BASELINE, BY_NAME, VARIANTS
from slipstream.data.store import SequenceStore

Results = dict[str, dict[int, dict[str, Any]]]  # variant -> seed -> result


def summarise(
    runs: Sequence[Planned], stores: dict[str, SequenceStore], out: Path
) -> dict[str, Any]:
    """Return everything the study found so far, case by case, ready for JSON."""
    done = [(run, found) for run in runs if (found := run.result(out)) is not None]
    cases = []
    for case in dict.fromkeys(run.case.name for run in runs):
        mine = [run for run in runs if run.case.name == case]
        results: Results = {}
        for run, found in done:
            if run.case.name == case:
                results.setdefault(run.variant.name, {})[run.seed] = found
        cases.append(_of_case(mine[0], results, stores[case], planned=len(mine)))
    return {
        "study": "staleness",
        "runs_done": len(done),
        "runs_planned": len(runs),
        "cpu_seconds": sum(found["cpu_seconds"] for _, found in done),
        "exact_schedules_exact": all(
            row["bits"]["all_equal"] for case in cases for row in case["rows"] if row["bits"]
        ),
        "cases": cases,
    }


def _of_case(
    sample: Planned, results: Results, store: SequenceStore, planned: int
) -> dict[str, Any]:
    case = sample.case
    rows = [_row(case, variant.name, results) for variant in VARIANTS if variant.name in results]
    for figure in case.figures:
        compared = [
            row for row in rows if figure in row["difference"] and not BY_NAME[row["variant"]].exact
        ]
        for row, adjusted in zip(
            compared, holm([row["difference"][figure]["t_p"] for row in compared]), strict=True
        ):
            row["difference"][figure]["holm_p"] = adjusted
    every = [found for by_seed in results.values() for found in by_seed.values()]
    return {
        "case": case.name,
        "about": case.about,
        "figures": list(case.figures),
        "store": {
            "digest": store.digest,
            "users": store.num_users,
            "items": store.num_items,
            "behaviours": store.num_behaviours,
        },
        "recipe": case.recipe,
        "steps": max((found.get("steps", 0) for found in every), default=0),
        "runs": {"done": len(every), "planned": planned},
        "collisions": collision_rates(sample.recipe(), store),
        "rows": rows,
    }


def _row(case: Case, name: str, results: Results) -> dict[str, Any]:
    """Summarise one variant: its figures seed by seed, and their differences to the baseline."""
    mine = {seed: found for seed, found in sorted(results[name].items()) if "figures" in found}
    base = {seed: found for seed, found in results.get(BASELINE, {}).items() if "figures" in found}
    paired = [seed for seed in mine if seed in base]
    row: dict[str, Any] = {
        "variant": name,
        "about": BY_NAME[name].about,
        "seeds": list(mine),
        "failed": {
            seed: found["failed"] for seed, found in results[name].items() if "failed" in found
        },
        "samples": {
            figure: [found["figures"][figure] for found in mine.values()] for figure in case.figures
        },
        "mean": {},
        "difference": {},
        "bits": _bits(name, results),
        "seconds": statistics.fmean(found["seconds"] for found in results[name].values()),
    }
    for figure in case.figures:
        if mine:
            row["mean"][figure] = statistics.fmean(row["samples"][figure])
        if name != BASELINE and len(paired) >= 2:
            ours, theirs = ([of[seed]["figures"][figure] for seed in paired] for of in (mine, base))
            row["difference"][figure] = asdict(compare(ours, theirs))
            row["difference"][figure]["seeds"] = paired
    return row


def _bits(name: str, results: Results) -> dict[str, Any] | None:
    """Check seed by seed whether a variant reproduced the bits of another one."""
    partner = BY_NAME[name].same_bits_as
    if partner is None or partner not in results:
        return None
    common = [seed for seed in sorted(results[name]) if seed in results[partner]]
    equal = [
        seed
        for seed in common
        if results[name][seed].get("bits", 0) == results[partner][seed].get("bits", 1)
    ]
    if not common:
        return None
    return {
        "of": partner,
        "compared": len(common),
        "equal": len(equal),
        "all_equal": equal == common,
    }
