"""What the tables of README and docs show, by the name that a page marks.

Touch this when a page shows other columns of a result; evidence.py writes them.
"""

from typing import Any

from benchmarks.evidence import Claim, ClaimTable, Column, EvidenceTable, RowTable

TABLES: dict[str, EvidenceTable] = {
    "checkpoint-first-rule": RowTable(
        "checkpoint_first_rule",
        (
            Column("checkpoint", lambda row: row["variant"] + (", folded" * row.get("folded", 0))),
            Column("seconds it costs", "cost_s", ".1f"),
            Column("of which the loop waits", lambda row: row.get("blocked_s"), ".1f"),
            Column("GB written", "bytes", ".2f", 1e-9),
        ),
    ),
    "full-recipes": RowTable(
        "full_recipes",
        (
            Column("recipe", lambda row: f"`{row['variant']}`"),
            Column("tokens a step", "token budget"),
            Column("s a step", "s a step", ".1f"),
            Column("peak GB", "peak GB", ".1f"),
            Column("loss", "loss", ".2f"),
            Column("failure", lambda row: row["failure"] or "none"),
        ),
    ),
    "large-catalogue": RowTable(
        "large_catalogue",
        (
            Column("command", "variant"),
            Column("held MB", "held MB", ",.0f"),
            Column("mapped MB", "mapped MB", ",.0f"),
            Column("s", "seconds", ",.0f"),
        ),
    ),
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
            Claim(
                "NestPipe's table: largest deviation at 1,536 workers, points",
                "simulate",
                "worst_error_points_1536",
                ".1f",
                bar=5.0,
                at_most=True,
            ),
            Claim(
                "NestPipe's table: largest deviation at 512 to 1,536 workers, points",
                "simulate",
                "worst_error_points",
                ".1f",
                bar=5.0,
                at_most=True,
            ),
            Claim(
                "of 13 held-out rows, deviating by more than 5 points",
                "simulate",
                "rows_beyond_5_points",
                ".0f",
                bar=0.0,
                at_most=True,
            ),
            Claim(
                "NestPipe's speedup at 1,536 workers (printed 3.06)",
                "simulate",
                "nestpipe_speedup_1536",
                bar=2.754,
            ),
            Claim(
                "1,536 workers x 100 steps, seconds",
                "simulate",
                "seconds_100_steps",
                ".1f",
                bar=60.0,
                at_most=True,
            ),
            Claim(
                "one step of 1,536 workers, seconds",
                "simulate",
                "seconds_one_step",
                bar=0.8,
                at_most=True,
            ),
            Claim(
                "peak memory, GB",
                "simulate",
                "peak_bytes",
                ".2f",
                1e-9,
                bar=4e9,
                at_most=True,
            ),
        )
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
