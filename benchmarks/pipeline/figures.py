"""Rows and claims of the pipeline benchmark, from the samples of its ranks.

Touch this when a figure is defined in another way; benchmarks/protocols/pipeline.md says how.
"""

from typing import Any

from benchmarks.pipeline.rank import PLAIN, STAGE_CPU
from slipstream.bench.harness import Row, median, spread

CORES, EMULATED = "two cores", "emulated device"
PAPER, TURBO = "NestPipe at 1,536 workers", "TurboGR's ratio"
LATENCY = "NestPipe at 1,536 workers, slow by latency"
OVERLAP = "NestPipe at 1,536 workers, batches that overlap more"
Samples = list[dict[str, float]]


def medians(samples: Samples) -> dict[str, float]:
    """Return the median of every figure."""
    return {name: median([one[name] for one in samples]) for name in samples[0]}


def plain_shares(plain: dict[str, float]) -> dict[str, float]:
    """Return the share of each lane in the synchronous step."""
    kinds = ("lookup", "comm", "host", "compute")
    return {kind: plain[f"{kind}_seconds"] / plain["step_seconds"] for kind in kinds}


def bound_of(plain: dict[str, float], *, tier_is_lane: bool = True) -> float:
    """Return how many times faster than the synchronous step its busiest lane allows.

    A tier that is slow by latency keeps no lane busy: several lookups may wait at a time.
    """
    shares = plain_shares(plain)
    return 1 / max(share for kind, share in shares.items() if tier_is_lane or kind != "lookup")


def rows_of(
    title: str,
    device: str,
    found: dict[str, Any],
    differences: dict[str, float],
    *,
    tier_is_lane: bool = True,
) -> list[Row]:
    """One row per variant of a setting."""
    plain = medians(found["variants"][f"{PLAIN} 1"])
    bound, rows = bound_of(plain, tier_is_lane=tier_is_lane), []
    for variant, samples in found["variants"].items():
        one = medians(samples)
        row: Row = {"variant": f"{title}: {variant}", "device": device}
        row["step_ms"] = 1e3 * one["step_seconds"]
        row["spread"] = spread([each["step_seconds"] for each in samples])
        row["speedup"] = plain["step_seconds"] / one["step_seconds"]
        row["bound"], row["bound_share"] = bound, row["speedup"] / bound
        row["utilisation"] = plain["compute_seconds"] / one["step_seconds"]
        row |= plain_figures(plain) if variant == f"{PLAIN} 1" else schedule_figures(one, plain)
        row["cpu_ms"], row["sent_mb"] = 1e3 * one["cpu_seconds"], one["sent_bytes"] / 1e6
        spent = stage_milliseconds(one)
        row["lanes_ms"] = sum(spent.values()) if spent else float("nan")
        row["reads"] = one.get("reads", float("nan"))
        row["max_diff"] = differences.get(f"{variant} {PLAIN}", float("nan"))
        row["diff_same_cut"] = differences.get(f"{variant} same_cut", float("nan"))
        row["samples"] = samples
        rows.append(row)
    return rows


def stage_milliseconds(one: dict[str, float]) -> dict[str, float]:
    """Return the processor time a step of every stage beside compute, by stage."""
    return {
        name.removeprefix(STAGE_CPU): 1e3 * seconds
        for name, seconds in one.items()
        if name.startswith(STAGE_CPU) and name not in (f"{STAGE_CPU}compute", f"{STAGE_CPU}update")
    }


def plain_figures(plain: dict[str, float]) -> Row:
    """Return the shares of the synchronous step; nothing in it is hidden."""
    shares = plain_shares(plain)
    return {
        "lookup": shares["lookup"],
        "comm": shares["comm"],
        "sparse_comm": float("nan"),
        "comm_share": 1.0,
        "host": shares["host"],
        "compute": shares["compute"],
        "own_bound": float("nan"),
    }


def schedule_figures(one: dict[str, float], plain: dict[str, float]) -> Row:
    """Return what a schedule leaves exposed; a peer that tells its time alone has no figures."""
    nothing = float("nan")
    busy = max((value for name, value in one.items() if name.startswith("busy_")), default=nothing)
    step = one["step_seconds"]
    return {
        "lookup": one.get("exposed_lookup", nothing),
        "comm": one.get("exposed_comm", nothing),
        "sparse_comm": one.get("exposed_sparse_comm", nothing),
        # Against what the synchronous step communicates: a cut sends more, which must not flatter
        # the share.
        "comm_share": one.get("exposed_comm", nothing) * step / max(plain["comm_seconds"], 1e-9),
        "host": nothing,
        "compute": one.get("compute_utilisation", nothing),
        "own_bound": plain["step_seconds"] / (busy * step),
    }


def claims_of(
    rows: list[Row], differences: dict[str, float], inflation: dict[str, float]
) -> dict[str, float]:
    """Return the headline figures."""

    def row_at(title: str, variant: str, device: str = CORES) -> Row:
        wanted = (f"{title}: {variant}", device)
        return next(row for row in rows if (row["variant"], row["device"]) == wanted)

    def fastest(title: str, device: str) -> float:
        """Return the speedup of the better number of buffers."""
        return max(
            row["speedup"]
            for row in rows
            if row["variant"].startswith(f"{title}: nested") and row["device"] == device
        )

    nested, plain = row_at(PAPER, "nested 8"), row_at(PAPER, f"{PLAIN} 1")
    on_device = row_at(PAPER, "nested 8", EMULATED)
    against_plain = {name: value for name, value in differences.items() if name.endswith(PLAIN)}
    same_cut = [value for name, value in differences.items() if name.endswith("same_cut")]
    uncut = [value for name, value in against_plain.items() if name.split()[-2] == "1"]
    by_stage = stage_milliseconds(medians(nested["samples"]))
    return {
        "nested_speedup": nested["speedup"],
        "nested_bound": nested["bound"],
        "nested_bound_share": nested["bound_share"],
        "nested_bound_share_overlap": row_at(OVERLAP, "nested 8")["bound_share"],
        "nested_speedup_emulated": on_device["speedup"],
        "nested_bound_share_emulated": on_device["bound_share"],
        "nested_speedup_latency": fastest(LATENCY, CORES),
        "nested_speedup_latency_emulated": fastest(LATENCY, EMULATED),
        "nested_speedup_min": min(
            row["speedup"]
            for row in rows
            if row["variant"].endswith("nested 8") and row["device"] == CORES
        ),
        "exposed_lookup": nested["lookup"],
        "exposed_comm_share": nested["comm_share"],
        "compute_utilisation": row_at(TURBO, "six_stage 1")["utilisation"],
        "compute_utilisation_emulated": row_at(TURBO, "six_stage 1", EMULATED)["utilisation"],
        "semi_async_exposed": row_at(TURBO, "semi_async 1")["sparse_comm"],
        "max_diff": max(against_plain.values()),
        "max_diff_uncut": max(uncut, default=float("nan")),
        "max_diff_same_cut": max(same_cut),
        "bitwise": float(not max(against_plain.values())),
        "lane_cpu_ms": nested["cpu_ms"] - plain["cpu_ms"],
        "lane_cpu_ms_six_stage": row_at(TURBO, "six_stage 1")["cpu_ms"]
        - row_at(TURBO, f"{PLAIN} 1")["cpu_ms"],
        "lanes_ms": nested["lanes_ms"],
        **{f"lanes_ms_{stage}": spent for stage, spent in by_stage.items()},
        "plain_lookup_share": plain["lookup"],
        "plain_comm_share": plain["comm"],
        "plain_comm_share_turbo": row_at(TURBO, f"{PLAIN} 1")["comm"],
        "batch_overlap": inflation["overlap"],
        "key_inflation_bench": inflation["clustered"],
        "key_inflation_bench_random": inflation["random"],
    }
