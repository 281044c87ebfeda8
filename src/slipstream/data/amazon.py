"""Reads one category of Amazon Reviews 2023: ratings as CSV or reviews as JSON lines, titles from
`meta_<category>` if there.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import polars as pl

from slipstream.data.raw_log import Columns, RawLog, scan_files
from slipstream.errors import SlipstreamError

COLUMNS = Columns("user_id", "parent_asin", "timestamp", actions=("rating",))
REVIEW_SCHEMA = {
    "user_id": pl.String,
    "parent_asin": pl.String,
    "rating": pl.Float64,
    "timestamp": pl.Int64,
}
META_SCHEMA = {
    "parent_asin": pl.String,
    "title": pl.String,
    "main_category": pl.String,
    "store": pl.String,
}


def category_name(category: str) -> str:
    """A category as the data set spells it: letters and underscores, never a path."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z_]{0,60}", category):
        raise SlipstreamError(
            f"'{category}' is not an Amazon category; write it like All_Beauty or Video_Games"
        )
    return category


def read_amazon(root: Path) -> RawLog:
    """The ratings or reviews in `root` (a folder, or the one file itself)."""
    paths = (
        [root]
        if root.is_file()
        else sorted(
            p
            for p in root.rglob("*")
            if p.name.endswith((".csv", ".csv.gz", ".jsonl", ".jsonl.gz"))
        )
    )
    reviews = [path for path in paths if not path.name.startswith("meta_")]
    if len(reviews) != 1:
        raise SlipstreamError(
            f"{root} should hold one file of Amazon reviews (.csv, .csv.gz, .jsonl or .jsonl.gz), "
            f"found {len(reviews)}"
        )
    plain = reviews[0].name.endswith((".csv", ".csv.gz"))
    log = scan_files(reviews) if plain else _scan_json(reviews[0], REVIEW_SCHEMA)
    meta = [path for path in paths if path.name.startswith("meta_")]
    return RawLog(log, COLUMNS, time_unit="ms", items=_titles(meta[0]) if meta else None)


def _titles(path: Path) -> pl.LazyFrame:
    return _scan_json(path, META_SCHEMA).rename({"parent_asin": "id"})


def _scan_json(path: Path, schema: Mapping[str, type[pl.DataType]]) -> pl.LazyFrame:
    """JSON lines with only the columns we need; anything else a review holds is skipped."""
    return pl.scan_ndjson(path, schema=dict(schema))
