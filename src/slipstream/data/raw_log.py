"""A raw log as it was found: a lazy frame, which of its columns say who, what and when, and what is
known of items and users.

Nothing is read here but schemas and, when a check fails, the one row to name. Every failed check is
one sentence that says where.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from slipstream.errors import SlipstreamError, did_you_mean

ACTION = "action:"
UNITS = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
DATES = ("%Y-%m-%d %H:%M:%S%.f", "%Y-%m-%d %H:%M:%S", "%Y-%m-%d %H:%M", "%Y-%m-%d")  # UTC
LAST_SECOND = 253_402_300_799  # the end of the year 9999
LARGEST = (1 << 63) - 1


@dataclass(frozen=True)
class Columns:
    """Names of a log's columns, as its owner calls them."""

    user: str
    item: str
    time: str
    actions: tuple[str, ...] = ()
    title: str | None = None


@dataclass(frozen=True)
class RawLog:
    """A log not yet read. `items` and `users` have a column `id`, perhaps `title`, and categorical
    features under their names.
    """

    raw: pl.LazyFrame
    columns: Columns
    time_unit: str = "s"
    items: pl.LazyFrame | None = None
    users: pl.LazyFrame | None = None
    source: dict[str, Any] = field(default_factory=dict)
    untyped: bool = True  # as in CSV: text that is whole numbers throughout means numbers
    schema: pl.Schema = field(init=False)
    dated: bool = field(
        init=False, default=False
    )  # whether the time column is text like 2024-05-01 12:30:00

    def __post_init__(self) -> None:
        if self.time_unit not in UNITS:
            raise SlipstreamError(
                f"unknown time unit '{self.time_unit}'{did_you_mean(self.time_unit, UNITS)}"
            )
        with polars_errors_are_sentences(self.source.get("path", "the log")):
            object.__setattr__(self, "schema", self.raw.collect_schema())
        wanted = {"user": self.columns.user, "item": self.columns.item, "time": self.columns.time}
        wanted |= {f"action {name}": name for name in self.columns.actions}
        wanted |= {"title": self.columns.title} if self.columns.title else {}
        for role, name in wanted.items():
            if name not in self.schema:
                raise SlipstreamError(
                    f"the log has no column '{name}' for the "
                    f"{role.split()[0]}{did_you_mean(name, self.schema.names())}"
                )

        if self.schema[self.columns.time] == pl.String:
            with polars_errors_are_sentences(self.source.get("path", "the log")):
                first = (
                    self.raw.select(self.columns.time)
                    .head(100)
                    .collect(engine="streaming")
                    .to_series()
                    .drop_nulls()
                )
            object.__setattr__(
                self,
                "dated",
                bool(len(first)) and re.match(r"\s*\d{4}-\d\d-\d\d", first[0]) is not None,
            )

    def expressions(self) -> dict[str, pl.Expr]:
        """Canonical columns: `user`, `item` (int64 or text), `time` (int64, in the log's unit),
        `action:<name>` (float32).
        """
        named = {
            "user": _id_expression(self.columns.user, self.schema[self.columns.user], "user"),
            "item": _id_expression(self.columns.item, self.schema[self.columns.item], "item"),
            "time": _time_expression(self.columns.time, self.schema[self.columns.time], self.dated),
        }
        for name in self.columns.actions:
            named[f"{ACTION}{name}"] = _action_expression(name, self.schema[name])
        return named

    @property
    def frame(self) -> pl.LazyFrame:
        return self.raw.select(**self.expressions())

    @property
    def per_second(self) -> int:
        """How many of the canonical time column's units make a second."""
        dtype = self.schema[self.columns.time]
        return (
            UNITS["us"]
            if self.dated or isinstance(dtype, pl.Datetime)
            else 1
            if dtype == pl.Date
            else UNITS[self.time_unit]
        )

    def first_offender(self, column: str, bad: pl.Expr) -> tuple[int, Any]:
        """The first row (counted from 1, header not counted) where `bad` holds, and what the
        original column has there.
        """
        row = (
            self.raw.with_row_index("#")
            .with_columns(bad.alias("#bad"))
            .filter(pl.col("#bad"))
            .head(1)
        )
        found = row.select("#", column).collect(engine="streaming")
        return int(found.item(0, 0)) + 1, found.item(0, 1)


class polars_errors_are_sentences:
    """Turns what Polars has to say about an unreadable file into our one sentence."""

    def __init__(self, what: Any) -> None:
        self.what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, pl.exceptions.NoDataError):
            raise SlipstreamError(f"{self.what} is empty: there is nothing to prepare") from error
        if isinstance(error, pl.exceptions.PolarsError | FileNotFoundError | UnicodeDecodeError):
            first_line = (str(error).strip().splitlines() or ["unknown reason"])[0]
            raise SlipstreamError(f"{self.what} could not be read: {first_line}") from error


def _id_expression(name: str, dtype: pl.DataType, role: str) -> pl.Expr:
    if dtype.is_integer():
        return pl.col(name).cast(pl.Int64, strict=False)
    if dtype in (pl.String, pl.Categorical, pl.Enum):
        return pl.col(name).cast(pl.String)
    raise SlipstreamError(
        f"{role} column '{name}' holds {dtype}, but ids must be whole numbers or text; convert "
        "the column first"
    )


def _time_expression(name: str, dtype: pl.DataType, dated: bool) -> pl.Expr:
    column = pl.col(name)
    if dated:
        plain = column.str.strip_chars().str.replace("T", " ", literal=True).str.strip_suffix("Z")
        return pl.coalesce(
            *[plain.str.to_datetime(shape, time_unit="us", strict=False) for shape in DATES]
        ).dt.epoch("us")
    if isinstance(dtype, pl.Datetime):
        return column.dt.epoch("us")
    if dtype == pl.Date:
        return column.dt.epoch("s")
    if dtype.is_integer():
        return column.cast(pl.Int64, strict=False)
    if dtype.is_float():
        return column.floor().cast(pl.Int64, strict=False)
    if dtype == pl.String:
        trimmed = column.str.strip_chars()
        whole = trimmed.cast(pl.Int64, strict=False)
        return pl.coalesce(
            whole, trimmed.cast(pl.Float64, strict=False).floor().cast(pl.Int64, strict=False)
        )
    raise SlipstreamError(f"time column '{name}' holds {dtype}, but it must hold numbers or dates")


def _action_expression(name: str, dtype: pl.DataType) -> pl.Expr:
    column = pl.col(name)
    if dtype == pl.Boolean or dtype.is_numeric():
        number = column.cast(pl.Float32, strict=False)
    elif dtype == pl.String:
        text = column.str.strip_chars().str.to_lowercase()
        spelled = pl.when(text == "true").then(1.0).when(text == "false").then(0.0)
        number = spelled.otherwise(text.cast(pl.Float64, strict=False)).cast(pl.Float32)
    else:
        raise SlipstreamError(
            f"action column '{name}' holds {dtype}, but it must hold numbers or true/false"
        )
    return pl.when(number.is_finite()).then(number)


def check_values(log: RawLog, facts: dict[str, Any]) -> None:
    """Raise the one sentence for the first thing wrong. `facts`: `rows`, `nulls` by canonical
    column, `min_time`, `max_time`.
    """
    if facts["rows"] == 0:
        raise SlipstreamError(
            f"{log.source.get('path', 'the log')} is empty: there is nothing to prepare"
        )
    named = {"user": log.columns.user, "item": log.columns.item, "time": log.columns.time}
    named |= {f"{ACTION}{name}": name for name in log.columns.actions}
    expressions = log.expressions()
    for canonical, column in named.items():
        if facts["nulls"][canonical]:
            row, value = log.first_offender(column, expressions[canonical].is_null())
            raise SlipstreamError(_bad_value(canonical, column, row, value))
    if facts["min_time"] < 0:
        row, value = log.first_offender(log.columns.time, expressions["time"] < 0)
        raise SlipstreamError(
            f"time column '{log.columns.time}' is negative in row {row} ({value}); times count "
            "from 1970, drop or mend such rows"
        )
    limit = LAST_SECOND * log.per_second
    if facts["max_time"] > limit:
        row, value = log.first_offender(log.columns.time, expressions["time"] > limit)
        raise SlipstreamError(
            f"time column '{log.columns.time}' has {value} in row {row}, beyond the year 9999 "
            f"when read in '{log.time_unit}'; "
            "give the right --time-unit (s, ms, us or ns)"
        )


def _bad_value(canonical: str, column: str, row: int, value: Any) -> str:
    role = canonical.split(":")[0]
    if value is None or value == "":
        return f"{role} column '{column}' is empty in row {row}; fill it in or drop the row"
    if role in ("user", "item"):
        return (
            f"{role} id {value} in row {row} is larger than {LARGEST}; ids must fit in 64 "
            "signed bits or be text"
        )
    return (
        f"{role} column '{column}' has '{value}' in row {row}, which is not a usable number; "
        "mend or drop the row"
    )


def scan_files(paths: Sequence[Path], **csv_options: Any) -> pl.LazyFrame:
    """A lazy frame over CSV (also gzipped) or Parquet files, in the order given. CSV columns stay
    text until they are checked.
    """
    kinds = {"parquet" if path.suffix in (".parquet", ".pq") else "csv" for path in paths}
    if len(kinds) != 1:
        raise SlipstreamError(f"{paths[0].parent} mixes CSV and Parquet logs; keep one kind")
    for path in paths:
        if not path.is_file():
            raise SlipstreamError(f"{path} does not exist")
        if path.stat().st_size == 0:
            raise SlipstreamError(f"{path} is empty: there is nothing to prepare")
    with polars_errors_are_sentences(paths[0]):
        if kinds == {"parquet"}:
            return pl.scan_parquet(list(paths))
        return pl.scan_csv(list(paths), infer_schema=False, **csv_options)
