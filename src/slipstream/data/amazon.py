"""Reads one category of Amazon Reviews 2023. Touch this when its files change.

Ratings are CSV files or reviews JSON lines; titles come from `meta_<category>`, if it is there.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import polars as pl

from slipstream.data.log_files import scan_files
from slipstream.data.raw_log import Columns, RawLog
from slipstream.errors import SlipstreamError

COLUMNS = Columns("user_id", "parent_asin", "timestamp", actions=("rating",))
SUFFIXES = (".csv", ".csv.gz", ".jsonl", ".jsonl.gz")
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
    """Return a category as the data set spells it, or raise: letters and underscores, no path."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z_]{0,60}", category):
        raise SlipstreamError(
            f"'{category}' is not an Amazon category; write it like All_Beauty or Video_Games"
        )
    return category


def read_amazon(root: Path) -> RawLog:
    """Read the ratings or reviews in `root` (a folder, or the one file itself)."""
    found = [path for path in root.rglob("*") if path.name.endswith(SUFFIXES)]
    paths = [root] if root.is_file() else sorted(found)
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
    """Scan JSON lines for the columns of `schema`; other fields are skipped."""
    return pl.scan_ndjson(path, schema=dict(schema))
