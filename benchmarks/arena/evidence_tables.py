"""The arena's tables for README and docs, by the names that a page marks.

Touch this when a page shows other columns of a contest.
"""

from typing import Any

from benchmarks.arena.data_sets import DATA_SETS, QUICK
from benchmarks.arena.report import short_time
from benchmarks.evidence import Claim, ClaimTable, Column, EvidenceTable, RowTable


def _figure(name: str, form: str, scale: float = 1.0) -> Any:
    """Return a column's field; a failed contender has none."""

    def field(row: dict[str, Any]) -> str:
        value = row.get(name)
        return "" if value is None else f"{value * scale:{form}}"

    return field


def _time(name: str) -> Any:
    return lambda row: "" if not row["samples"] else short_time(row.get(name))


def _epochs(row: dict[str, Any]) -> str:
    return f"{row['best_epoch']:.0f} of {row['epochs']:.0f}" if row["samples"] else "failed"


def _deviation(row: dict[str, Any]) -> str:
    """Return the deviation over seeds; one seed has none."""
    return f"{row['sd NDCG@10']:.4f}" if len(row["samples"]) > 1 else ""


COLUMNS = (
    Column("", lambda row: f"**{row['variant']}**" if row["own"] else row["variant"]),
    Column("request time", lambda row: "yes" if row["request_time"] else ""),
    Column("HR@10", _figure("HR@10", ".4f")),
    Column("NDCG@10", _figure("NDCG@10", ".4f")),
    Column("±", _deviation),
    Column("best epoch", _epochs),
    Column("training to it", _time("seconds_to_best")),
    Column("to the first peer's quality", _time("seconds_to_quality")),
    Column("an epoch", _time("seconds_per_epoch")),
    Column("GB", _figure("peak_bytes", ".2f", 1e-9)),
    Column("p50 ms", _figure("recommend_ms_p50", ".1f")),
    Column("p99 ms", _figure("recommend_ms_p99", ".1f")),
)


def _rows_of(name: str) -> RowTable:
    return RowTable("arena", COLUMNS, keep=lambda row: row["data"] == name)


ARENA_TABLES: dict[str, EvidenceTable] = {
    **{f"arena-{name}": _rows_of(name) for name in DATA_SETS if name != QUICK},
    "arena-claims": ClaimTable(
        (
            Claim(
                "time to the quality of RecTools' HSTU, over its own",
                "arena",
                "time_vs_rectools_ml1m",
                ".3f",
                bar=1 / 30,
                at_most=True,
                in_parts=True,
            ),
            Claim(
                "memory, over that of RecTools' HSTU",
                "arena",
                "memory_vs_rectools_ml1m",
                bar=0.25,
                at_most=True,
                in_parts=True,
            ),
        )
    ),
}
