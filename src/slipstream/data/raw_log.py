"""A log that is not read yet: a lazy frame, its columns by role, facts about items and users.

Touch this to accept another type of column, or to check values differently. Only schemas are read
here and, when a check fails, the first bad row: the error names it.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from slipstream.data.store import ACTION
from slipstream.errors import SlipstreamError, did_you_mean

Progress = Callable[[str, int, int], None]  # (what is being done, done so far, total)
UNITS = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
DATES = ("%Y-%m-%d %H:%M:%S%.f", "%Y-%m-%d %H:%M:%S", "%Y-%m-%d %H:%M", "%Y-%m-%d")  # UTC
LAST_SECOND = 253_402_300_799  # the end of the year 9999
LARGEST = (1 << 63) - 1


@dataclass(frozen=True)
class Columns:
    """The names of a log's columns by role."""

    user: str
    item: str
    time: str
    actions: tuple[str, ...] = ()
    title: str | None = None


@dataclass(frozen=True)
class RawLog:
    """A log that is not read yet.

    `items` and `users` have a column `id`, perhaps a `title`, and categorical features by name.
    """

    raw: pl.LazyFrame
    columns: Columns
    time_unit: str = "s"
    items: pl.LazyFrame | None = None
    users: pl.LazyFrame | None = None
    source: dict[str, Any] = field(default_factory=dict)
    untyped: bool = True  # as in CSV: ids that are all whole numbers are numbers
    schema: pl.Schema = field(init=False)
    dated: bool = field(init=False, default=False)  # time is text like 2024-05-01 12:30:00

    def __post_init__(self) -> None:
        if self.time_unit not in UNITS:
            raise SlipstreamError(
                f"unknown time unit '{self.time_unit}'{did_you_mean(self.time_unit, UNITS)}"
            )
        with explain_polars_errors(self.source.get("path", "the log")):
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
            with explain_polars_errors(self.source.get("path", "the log")):
                head = self.raw.select(self.columns.time).head(100).collect(engine="streaming")
            first = head.to_series().drop_nulls()
            dated = bool(len(first)) and re.match(r"\s*\d{4}-\d\d-\d\d", first[0]) is not None
            object.__setattr__(self, "dated", dated)

    def expressions(self) -> dict[str, pl.Expr]:
        """Return the canonical columns.

        `user` and `item` (int64 or text), `time` (int64 in the log's unit), `action:<name>`
        (float32).
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
        """Return how many units of the canonical time column make a second."""
        dtype = self.schema[self.columns.time]
        if self.dated or isinstance(dtype, pl.Datetime):
            return UNITS["us"]
        return 1 if dtype == pl.Date else UNITS[self.time_unit]

    def first_bad_row(self, column: str, bad: pl.Expr) -> tuple[int, Any]:
        """Find the first row where `bad` holds (the first is 1) and its value in `column`."""
        row = (
            self.raw.with_row_index("#")
            .with_columns(bad.alias("#bad"))
            .filter(pl.col("#bad"))
            .head(1)
        )
        found = row.select("#", column).collect(engine="streaming")
        return int(found.item(0, 0)) + 1, found.item(0, 1)


@contextlib.contextmanager
def explain_polars_errors(what: Any) -> Iterator[None]:
    """Turn the errors of Polars about an unreadable file into a SlipstreamError."""
    try:
        yield
    except pl.exceptions.NoDataError as error:
        raise SlipstreamError(f"{what} is empty: there is nothing to prepare") from error
    except (pl.exceptions.PolarsError, FileNotFoundError, UnicodeDecodeError) as error:
        first_line = (str(error).strip().splitlines() or ["unknown reason"])[0]
        raise SlipstreamError(f"{what} could not be read: {first_line}") from error


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
    """Raise for the first thing that is wrong, with the row.

    `facts` holds `rows`, `nulls` by canonical column, `min_time` and `max_time`.
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
            row, value = log.first_bad_row(column, expressions[canonical].is_null())
            raise SlipstreamError(_bad_value(canonical, column, row, value))
    if facts["min_time"] < 0:
        row, value = log.first_bad_row(log.columns.time, expressions["time"] < 0)
        raise SlipstreamError(
            f"time column '{log.columns.time}' is negative in row {row} ({value}); times count "
            "from 1970, drop or mend such rows"
        )
    limit = LAST_SECOND * log.per_second
    if facts["max_time"] > limit:
        row, value = log.first_bad_row(log.columns.time, expressions["time"] > limit)
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
    """Scan CSV (also gzipped) or Parquet files, in the order given; CSV columns are text."""
    kinds = {"parquet" if path.suffix in (".parquet", ".pq") else "csv" for path in paths}
    if len(kinds) != 1:
        raise SlipstreamError(f"{paths[0].parent} mixes CSV and Parquet logs; keep one kind")
    for path in paths:
        if not path.is_file():
            raise SlipstreamError(f"{path} does not exist")
        if path.stat().st_size == 0:
            raise SlipstreamError(f"{path} is empty: there is nothing to prepare")
    with explain_polars_errors(paths[0]):
        if kinds == {"parquet"}:
            return pl.scan_parquet(list(paths))
        return pl.scan_csv(list(paths), infer_schema=False, **csv_options)
