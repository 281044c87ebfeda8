"""Tables of what the simulator is held against: two papers, and this machine.

Touch this when a figure of `benchmarks.simulate` is shown or named in another way.
"""

from typing import Any

from benchmarks.evidence import Claim, ClaimTable, Column, EvidenceTable, RowTable
from benchmarks.evidence_training import at_most

SIMULATE_TABLES: dict[str, EvidenceTable] = {
    "simulate-claims": ClaimTable(
        (
            Claim(
                "our schedules, 1,536 workers: efficiency over 128",
                "simulate",
                "efficiency_1536",
                ".2f",
                100,
                " %",
                bar=0.9717,
            ),
            Claim(
                "our schedules, 1,536 workers: speedup over the printed TorchRec step",
                "simulate",
                "speedup_1536",
                bar=3.18,
            ),
            at_most(
                5.0,
                "NestPipe's table: largest deviation at 1,536 workers, points",
                "simulate",
                "worst_error_points_1536",
                ".1f",
            ),
            at_most(
                5.0,
                "NestPipe's table: largest deviation at 512 to 1,536 workers, points",
                "simulate",
                "worst_error_points",
                ".1f",
            ),
            at_most(
                0.0,
                "of 13 held-out rows, deviating by more than 5 points",
                "simulate",
                "rows_beyond_5_points",
                ".0f",
            ),
            Claim(
                "NestPipe's speedup at 1,536 workers (printed 3.06)",
                "simulate",
                "nestpipe_speedup_1536",
                bar=2.754,
            ),
            at_most(
                60.0, "1,536 workers x 100 steps, seconds", "simulate", "seconds_100_steps", ".1f"
            ),
            at_most(0.8, "one step of 1,536 workers, seconds", "simulate", "seconds_one_step"),
            at_most(4e9, "peak memory, GB", "simulate", "peak_bytes", ".2f", 1e-9),
            at_most(
                300.0,
                "a million requests on 100 instances, seconds",
                "simulate",
                "serving_million_seconds",
                ".0f",
            ),
            at_most(
                0.15,
                "measured steps of this machine: largest deviation",
                "simulate",
                "reality_error_step",
                ".1f",
                100,
                " %",
            ),
            Claim(
                "the same, the median",
                "simulate",
                "reality_error_step_median",
                ".1f",
                100,
                " %",
            ),
            Claim("steps compared", "simulate", "reality_rows", ".0f"),
            Claim("of these within 15 %", "simulate", "reality_rows_within_15", ".0f"),
            Claim(
                "measured serving rates of this machine: largest deviation",
                "simulate",
                "reality_error_slo",
                ".1f",
                100,
                " %",
                bar=0.2,
                at_most=True,
                in_parts=True,
            ),
            Claim(
                "the same rates, the median",
                "simulate",
                "reality_error_slo_median",
                ".1f",
                100,
                " %",
                in_parts=True,
            ),
            Claim("rates compared", "simulate", "reality_rates", ".0f", in_parts=True),
            Claim(
                "of these within 20 %", "simulate", "reality_rates_within_20", ".0f", in_parts=True
            ),
        )
    ),
    "simulate-reality": RowTable(
        "simulate",
        (
            Column("ranks, tier, exchange over compute: schedule", "variant"),
            Column("measured, ms", "measured_ms", ",.0f"),
            Column("simulated, ms", "simulated_ms", ",.0f"),
            Column("error %", "error", "+.1f", 100),
            Column("second model %", "error_second_model", "+.1f", 100),
            Column("first model %", "error_first_model", "+.1f", 100),
            Column("spread %", "spread", ".1f", 100),
        ),
        keep=lambda row: row["part"] == "reality" and "measured_ms" in row,
    ),
    "simulate-serving": RowTable(
        "simulate",
        (
            Column("requests: served", "variant"),
            Column("recorded, a second", "recorded", ".1f"),
            Column("simulated, a second", "simulated", ".1f"),
            Column("error %", "error", "+.1f", 100),
        ),
        keep=lambda row: row["part"] == "serving",
    ),
    "simulate-table": RowTable(
        "simulate",
        (
            Column("system", "system"),
            Column("workers", "workers", ",d"),
            Column("predicted %", "predicted", ".1f", 100),
            Column("printed %", "printed", ".2f", 100),
            Column("points", "points", "+.1f"),
            Column("", lambda row: _mark(row)),
        ),
        keep=lambda row: row["part"] == "nestpipe" and row["laws"] == "as the protocol says",
    ),
    "simulate-afterwards": RowTable(
        "simulate",
        (
            Column("system", "system"),
            Column("workers", "workers", ",d"),
            Column("predicted %", "predicted", ".1f", 100),
            Column("printed %", "printed", ".2f", 100),
            Column("points", "points", "+.1f"),
        ),
        keep=lambda row: row["part"] == "nestpipe" and row["laws"].startswith("afterwards"),
    ),
    "simulate-varied": RowTable(
        "simulate",
        (
            Column("assumption", "variant"),
            *(
                Column(system, system, ".1f", 100)
                for system in ("TorchRec", "2D-SP", "UniEmb", "NestPipe", "NestPipe + 2D-SP")
            ),
            Column("speedup", "speedup", ".2f"),
            Column("worst points", "worst_points", ".1f"),
            Column("rows beyond 5", "rows_beyond_5", "d"),
        ),
        keep=lambda row: row["part"] == "varied",
    ),
    "simulate-ours": RowTable(
        "simulate",
        (
            Column("`nested`", "variant"),
            Column("step at 128, ms", "step_128_ms", ",.0f"),
            Column("step at 1,536, ms", "step_ms", ",.0f"),
            Column("efficiency %", "efficiency", ".2f", 100),
            Column("speedup", "speedup", ".2f"),
        ),
        keep=lambda row: row["part"] == "ours",
    ),
    "simulate-techniques": RowTable(
        "simulate",
        (
            Column("schedule", "variant"),
            Column("step, ms", "step_ms", ",.0f"),
            Column("speedup", "speedup", ".2f"),
            Column("change, ms", "changes_ms", "+,.0f"),
        ),
        keep=lambda row: row["part"] == "techniques",
    ),
    "simulate-laws": RowTable(
        "simulate",
        (
            Column("by the laws", "variant"),
            Column("step, ms", "step_ms", ",.0f"),
            Column("efficiency %", "efficiency", ".1f", 100),
            Column("speedup over `serial`", "speedup", ".2f"),
        ),
        keep=lambda row: row["part"] == "by laws",
    ),
    "simulate-turbogr": RowTable(
        "simulate",
        (
            Column("row", "variant"),
            Column("printed", "printed", ",.4g"),
            Column("nearest", "nearest", ",.4g"),
            Column("error %", "error", "+.1f", 100),
            Column("where in the sweep", "where"),
            Column("within 10 %", lambda row: "yes" if row["within_10"] else "**no**"),
        ),
        keep=lambda row: row["part"] == "turbogr",
    ),
}


def _mark(row: dict[str, Any]) -> str:
    """Say what a row of NestPipe's table is for."""
    if row["calibrates"]:
        return "calibrates"
    return "**beyond 5 points**" if abs(row["points"]) > 5 else ""
