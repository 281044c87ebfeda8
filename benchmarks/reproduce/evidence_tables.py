"""Tables of quality on MovieLens-1M for README and docs: ours with the published rows.

Touch this when a page shows other columns.
"""

from typing import Any

from benchmarks.evidence import Claim, ClaimTable, Column, EvidenceTable, RowTable
from benchmarks.reproduce.bench import HIDDEN, KNOWN, UNUSED
from benchmarks.reproduce.published import ML_1M

WORDS = {
    KNOWN: "the model knows the time of the request",
    HIDDEN: "the same weights, the time of the request hidden",
    UNUSED: "trained and tested without the time of the request",
}


def _model(row: dict[str, Any]) -> str:
    if "model" in row:
        return str(row["model"])
    about = f"{len(row['seeds'])} seeds, {row['items']:,} items; {WORDS[row['request_time']]}"
    return f"**`{row['recipe']}`**, {about}"


def _deviation(name: str) -> Any:
    return lambda row: row.get(f"{name} spread")


COLUMNS = (
    Column("model", _model),
    Column("HR@10", "HR@10", ".4f"),
    Column("±", _deviation("HR@10"), ".4f"),
    Column("NDCG@10", "NDCG@10", ".4f"),
    Column("±", _deviation("NDCG@10"), ".4f"),
)
WIDER = tuple(Column(name, name, ".4f") for name in ("HR@50", "HR@200", "validation NDCG@10"))
PUBLISHED = [
    {"model": f"{row.model}: {row.source}", "HR@10": row.hr10, "NDCG@10": row.ndcg10}
    for row in sorted(ML_1M, key=lambda row: row.hr10)
    if row.order == "SASRec"
]


def claim(text: str, name: str, **more: Any) -> Claim:
    """Return a line of the claims."""
    return Claim(text, "reproduce", name, in_parts=True, **more)


REPRODUCE_TABLES: dict[str, EvidenceTable] = {
    "quality-readme": RowTable(
        "reproduce",
        COLUMNS,
        keep=lambda row: row["catalogue"] == "all" and row["request_time"] != HIDDEN,
        published=PUBLISHED[-1:] + PUBLISHED[-4:-2],
    ),
    "quality": RowTable("reproduce", COLUMNS + WIDER, published=PUBLISHED),
    "quality-claims": ClaimTable(
        (
            claim("time of the request known: HR@10", "hr10_ml1m", form=".4f", bar=0.3642),
            claim("the same, NDCG@10", "ndcg10_ml1m", form=".4f", bar=0.2164),
            claim("deviations above the best published, at least", "deviations_ml1m", bar=2.0),
            claim("time unused: HR@10", "hr10_ml1m_no_time", form=".4f", bar=0.3164),
            claim("the same, NDCG@10", "ndcg10_ml1m_no_time", form=".4f", bar=0.1857),
            claim(
                "deviations above the best published, at least", "deviations_ml1m_no_time", bar=2.0
            ),
        )
    ),
}
