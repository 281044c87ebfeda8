"""The time column of a log: what its values are, and how they become whole numbers.

Touch this to read another way of writing times. ISO text, dates and numbers are told apart by the
first values; the unit of numbers by their size: seconds of the years 1973 to 5138 lie between 1e8
and 1e11, milliseconds between 1e11 and 1e14, and so on.
"""

import re
from dataclasses import dataclass

import polars as pl

from slipstream.data.log_files import LogTable, explain_polars_errors
from slipstream.errors import SlipstreamError, did_you_mean

UNITS = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
NAMES = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
SECONDS_BELOW = 10**11
LAST_SECOND = 253_402_300_799  # the end of the year 9999
SAMPLE = 1_000
DAY = 86_400 * UNITS["us"]
# Date, clock (its seconds and their fraction may lack) and zone; text without a zone is UTC.
_ZONE = r"\s*(?:[Zz]|UTC|[+-]\d\d(?::?[0-5]\d)?)?"
_CLOCK = r"[Tt ](?:[01]\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:[.,]\d+)?)?"
ISO = rf"^\d{{4}}-\d\d-\d\d(?:{_CLOCK}{_ZONE}|\s*(?:[Zz]|UTC))?$"
TIME_NAME = re.compile(r"(^|_)(time|date|datetime|timestamp|ts|when|day)(_|$)|time$|_at$", re.I)


@dataclass(frozen=True)
class TimeColumn:
    """How the values of a time column become whole numbers, `per_second` to a second."""

    name: str | None  # None: the log has no times
    kind: str  # "none", "iso", "datetime", "date" or "number"
    unit: str = "s"  # of numbers
    detected: bool = False  # the unit was found, not given
    scale: int = 1  # numbers are multiplied by this: seconds with a fraction are kept finer

    @property
    def per_second(self) -> int:
        if self.kind in ("iso", "datetime"):
            return UNITS["us"]
        return UNITS[self.unit] * self.scale if self.kind == "number" else 1

    @property
    def format(self) -> str:
        """What the values are, in words."""
        words = {"none": "none", "iso": "ISO text", "datetime": "date-times", "date": "dates"}
        return words.get(self.kind) or NAMES[self.unit]

    @property
    def least(self) -> int:
        """The least value that looks like the detected unit; 0 where any value may be meant."""
        if self.kind != "number" or not self.detected or self.unit == "s":
            return 0
        return SECONDS_BELOW * UNITS[self.unit] // 1_000

    def expression(self, dtype: pl.DataType | None) -> pl.Expr:
        """Return the times as int64; null where there is none or it cannot be read."""
        if self.name is None:
            return pl.lit(0, dtype=pl.Int64)
        column = pl.col(self.name)
        if self.kind == "iso":
            return _iso_expression(column)
        if self.kind == "datetime":
            return column.dt.epoch("us")
        if self.kind == "date":
            return column.dt.epoch("s")
        if dtype is not None and dtype.is_integer():
            return column.cast(pl.Int64, strict=False)
        if dtype != pl.String:
            return self._whole(column.cast(pl.Float64))
        trimmed = column.str.strip_chars()
        if self.scale > 1:
            return self._whole(trimmed.cast(pl.Float64, strict=False))
        return pl.coalesce(
            trimmed.cast(pl.Int64, strict=False),
            self._whole(trimmed.cast(pl.Float64, strict=False)),
        )

    def _whole(self, number: pl.Expr) -> pl.Expr:
        return (number * self.scale).floor().cast(pl.Int64, strict=False)


def _iso_expression(column: pl.Expr) -> pl.Expr:
    """Parse ISO text to microseconds since 1970, by the places of its parts."""
    text = column.str.strip_chars()

    def part(value: pl.Expr) -> pl.Expr:
        return value.cast(pl.Int64, strict=False).fill_null(0)

    rest = text.str.slice(16)  # seconds, fraction, zone
    fraction = rest.str.extract(r"^:\d\d[.,](\d{1,6})").str.pad_end(6, "0")
    zone = rest.str.extract(r"([+-]\d\d(?::?\d\d)?)$").str.replace(":", "", literal=True)
    minutes = part(zone.str.slice(1, 2)) * 60 + part(zone.str.slice(3, 2))
    seconds = (
        part(text.str.slice(11, 2)) * 3_600
        + part(text.str.slice(14, 2)) * 60
        + part(rest.str.extract(r"^:(\d\d)"))
        - minutes * 60 * pl.when(zone.str.starts_with("-")).then(-1).otherwise(1)
    )
    days = text.str.slice(0, 10).str.to_date("%Y-%m-%d", strict=False).dt.epoch("d").cast(pl.Int64)
    whole = days * DAY + seconds * UNITS["us"] + part(fraction)
    return pl.when(text.str.contains(ISO)).then(whole)


def read_time_column(table: LogTable, name: str | None, unit: str | None) -> TimeColumn:
    """Find out how to read the time column `name`; `unit` is what the user says it is."""
    if unit is not None and unit not in UNITS:
        raise SlipstreamError(f"unknown time unit '{unit}'{did_you_mean(unit, UNITS)}")
    if name is None:
        return TimeColumn(None, "none")
    with explain_polars_errors(table.label):
        dtype = table.frame.collect_schema()[name]
        if isinstance(dtype, pl.Datetime):
            return TimeColumn(name, "datetime")
        if dtype == pl.Date:
            return TimeColumn(name, "date")
        if not (dtype.is_numeric() or dtype in (pl.String, pl.Null)):
            raise SlipstreamError(
                f"time column '{name}' holds {dtype}, but it must hold numbers or dates"
            )
        sample = table.frame.select(name).drop_nulls().head(SAMPLE).collect(engine="streaming")
    values = sample.to_series()
    if dtype == pl.String:
        values = values.str.strip_chars()
        values = values.filter(values != "")
        if len(values) and re.match(r"\d{4}-\d\d-\d\d", values[0]):
            return TimeColumn(name, "iso")
    numbers = values.cast(pl.Float64, strict=False).drop_nulls()
    numbers = numbers.filter(numbers.is_finite())
    found = unit or unit_of(float(numbers.abs().median() or 0) if len(numbers) else 0.0)  # type: ignore[arg-type]
    fine = found == "s" and not dtype.is_integer() and bool((numbers != numbers.floor()).any())
    return TimeColumn(name, "number", found, unit is None, UNITS["us"] if fine else 1)


def unit_of(size: float) -> str:
    """Return the unit that puts a number between the years 1973 and 5138; small ones: seconds."""
    for unit, per_second in UNITS.items():
        if size < SECONDS_BELOW * per_second:
            return unit
    return "ns"


def likely_time_column(schema: pl.Schema, taken: set[str]) -> str | None:
    """Return a column that no role uses and that looks like a time, by its type or its name."""
    for name, dtype in schema.items():
        if name not in taken and (dtype.is_temporal() or TIME_NAME.search(name)):
            return name
    return None
