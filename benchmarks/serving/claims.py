"""The claims of the serving benchmark, computed from what its parts found.

A claim whose part was not measured is absent. Touch this when the protocol defines another claim.
"""

import math
from collections.abc import Iterable
from statistics import median
from typing import Any

from benchmarks.serving.runs import Row

LEAST_RATE = 5.0  # a baseline below it enters no ratio
INLINE = ("W1", "W2")
Figures = dict[str, Any]


def compute_claims(figures: Figures, rows: Iterable[Row], longest: int) -> dict[str, float]:
    """Return every claim that the figures support; `longest` is the largest fixed length."""
    groups: Figures = figures.get("groups", {})
    claims = session_claims(groups) | no_reuse_claims(groups, longest) | ideal_claims(groups)
    for label, rates in figures.get("once", {}).items():
        length = label.removeprefix("S ")
        if length.isdigit():
            claims[f"slo_qps_long_{length}"] = rates["relay"] or 0.0
            claims[f"slo_qps_long_{length}_inline"] = rates["W1"] or 0.0
    found: Figures = figures.get("longest", {})
    if found.get("W1") and "relay" in found:
        claims["max_prefix_ratio"] = found["relay"] / found["W1"]
        claims |= {f"max_prefix_{name}": float(length) for name, length in found.items()}
    for name, sides in figures.get("ablations", {}).items():
        shares = {side: median(row["within_slo"] for row in made) for side, made in sides.items()}
        claims[f"{name}_gain"] = shares["with"] / max(1e-9, shares["without"])
    if "recommend" in figures:
        claims["recommend_p99_ms"] = figures["recommend"]["with"]
        claims["recommend_p99_ms_without"] = figures["recommend"]["without"]
    if "hit" in figures:
        wanted = ("hit_ms_1024", "hit_ms_2048", "hit_vs_engine_1024")
        claims |= {name: figures["hit"]["claims"][name] for name in wanted}
    if "truncation" in figures:
        claims |= {f"auc_{length}": auc for length, auc in figures["truncation"].items()}
    differences = [row["score_diff"] for row in rows if "score_diff" in row]
    if differences:
        claims["score_diff"] = max(differences)
    if "noise_floor_ms" in figures:
        claims["noise_floor_ms"] = figures["noise_floor_ms"]
    return claims


def best_inline(rates: dict[str, float | None]) -> float | None:
    """Return the best in-line rate, None where it is below what may enter a ratio."""
    best = max((rates.get(name) or 0.0 for name in INLINE), default=0.0)
    return best if best >= LEAST_RATE else None


def ratios_of(groups: Figures, trace: str) -> dict[str, float]:
    """Return relay / best in-line baseline by length, where both hold a rate."""
    found = {}
    for label, group in groups.items():
        name, _, length = label.partition(" ")
        baseline, relay = best_inline(group["rates"]), group["rates"].get("relay")
        if name == trace and baseline and relay:
            found[length] = relay / baseline
    return found


def session_claims(groups: Figures) -> dict[str, float]:
    """Return the claims on sessions."""
    ratios = ratios_of(groups, "S")
    claims: dict[str, float] = {}
    if ratios:
        claims["slo_qps_ratio"] = _geometric_mean(ratios.values())
        length, largest = max(ratios.items(), key=lambda each: each[1])
        claims["slo_qps_ratio_max"] = largest
        claims["slo_qps_ratio_max_length"] = float(length) if length.isdigit() else 0.0
        claims |= {f"slo_qps_ratio_{length}": ratio for length, ratio in ratios.items()}
    kept = []
    for label, group in groups.items():
        rates = group["rates"]
        if label.startswith("S ") and rates.get("relay") and rates.get("W3"):
            kept.append(rates["relay"] / rates["W3"])
    if kept:
        claims["slo_qps_ratio_keep"] = _geometric_mean(kept)
    entered = [
        group
        for label, group in groups.items()
        if label.startswith("S ") and best_inline(group["rates"])
    ]
    if entered:  # a rate stands in `rates` only where two of three verdicts are VALID
        claims["loadgen_valid"] = float(all(group["rates"].get("relay") for group in entered))
    return claims


def no_reuse_claims(groups: Figures, longest: int) -> dict[str, float]:
    """Return the claims on users who ask once."""
    ratios = ratios_of(groups, "N")
    claims = {}
    if ratios:
        claims["slo_qps_ratio_no_reuse_min"] = min(ratios.values())
    if str(longest) in ratios:
        claims["slo_qps_ratio_no_reuse"] = ratios[str(longest)]
    return claims


def ideal_claims(groups: Figures) -> dict[str, float]:
    """Return how near the variants come to their ideal queues, at worst."""
    claims = {}
    for name, claim in (("W1", "baseline_vs_ideal"), ("relay", "relay_vs_ideal")):
        shares = [
            group["rates"][name] / group["ideal"][name]
            for label, group in groups.items()
            if label.startswith("S ") and group["rates"].get(name) and group["ideal"].get(name)
        ]
        if shares:
            claims[claim] = min(shares)
    return claims


def group_rows(figures: Figures) -> list[Row]:
    """Return a row per length and variant, for the table."""
    rows: list[Row] = []
    for label, group in figures.get("groups", {}).items():
        baseline = best_inline(group["rates"])
        for name, rate in group["rates"].items():
            ideal = group["ideal"].get(name)
            rows.append(
                {
                    "variant": name,
                    "trace": label.partition(" ")[0],
                    "length": label.partition(" ")[2],
                    "slo_qps": rate,
                    "ideal_qps": ideal,
                    "of_ideal": rate / ideal if rate and ideal else None,
                    "over_inline": rate / baseline if rate and baseline else None,
                }
            )
    for label, rates in figures.get("once", {}).items():
        trace, _, length = label.partition(" ")
        rows += [
            {"variant": name, "trace": trace, "length": length, "slo_qps": rate, "verdicts": 1}
            for name, rate in rates.items()
        ]
    return rows


def _geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))
