"""Action columns of a log: numbers, true/false, or text such as view, cart, buy.

Touch this to read actions in another form. A text column becomes one 0/1 action per value, called
`column=value`, or numbers where the user says which. A missing value counts as 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import polars as pl

from slipstream.data.log_files import LogTable, explain_polars_errors
from slipstream.data.log_ids import TEXT_TYPES, missing_expression
from slipstream.errors import SlipstreamError

MOST_VALUES = 32
SAMPLE = 1_000


@dataclass(frozen=True)
class ActionColumn:
    """An action of the store: its name, the column it comes from, and its values as float32."""

    name: str
    column: str
    values: pl.Expr  # null where the value cannot be used
    reason: str = "has values that are no usable numbers"
    mapped: bool = False  # the numbers of its texts were given


def read_action_columns(
    table: LogTable, names: Sequence[str], values: Mapping[str, float] | None
) -> tuple[ActionColumn, ...]:
    """Find out how to read the action columns `names`; `values` are the numbers of their texts."""
    with explain_polars_errors(table.label):
        schema = table.frame.collect_schema()
        found = [each for name in names for each in _read(table, name, schema[name], values)]
    if values and not any(each.mapped for each in found):
        raise SlipstreamError(
            "action values are given, but no action column holds text; name the column with "
            "--action-columns"
        )
    twice = {each.name for each in found if [other.name for other in found].count(each.name) > 1}
    if twice:
        raise SlipstreamError(f"two actions would be called '{sorted(twice)[0]}'; rename a column")
    return tuple(found)


def _read(
    table: LogTable, name: str, dtype: pl.DataType, values: Mapping[str, float] | None
) -> list[ActionColumn]:
    column, missing = pl.col(name), missing_expression(name, dtype)
    if dtype == pl.Boolean or dtype.is_integer() or dtype == pl.Null:
        return [ActionColumn(name, name, column.cast(pl.Float32).fill_null(0))]
    if dtype.is_numeric():
        return [ActionColumn(name, name, _finite(column.cast(pl.Float32, strict=False), missing))]
    if dtype not in TEXT_TYPES:
        raise SlipstreamError(
            f"action column '{name}' holds {dtype}, but it must hold numbers, true/false or text"
        )
    text = column.cast(pl.String).str.strip_chars()
    missing = missing | (text == "").fill_null(False)
    sample = table.frame.filter(~missing).select(text).head(SAMPLE).collect(engine="streaming")
    words = sample.to_series()
    numeric = bool(words.to_frame("text").select(_number(pl.col("text")).is_not_null().any())[0, 0])
    if values and (not numeric or set(values) & set(words.to_list())):
        number = text.replace_strict(list(values), list(values.values()), default=None)
        spelled = ",".join(f"{word}={value:g}" for word, value in values.items())
        usable = _finite(number.cast(pl.Float32), missing)
        return [ActionColumn(name, name, usable, f"has values that are not among {spelled}", True)]
    if numeric or not len(words):
        return [ActionColumn(name, name, _finite(_number(text), missing))]
    return _one_per_value(table, name, text, missing)


def _number(text: pl.Expr) -> pl.Expr:
    lower = text.str.to_lowercase()
    spelled = pl.when(lower == "true").then(1.0).when(lower == "false").then(0.0)
    return spelled.otherwise(lower.cast(pl.Float64, strict=False)).cast(pl.Float32)


def _finite(number: pl.Expr, missing: pl.Expr) -> pl.Expr:
    lacking = missing | number.is_nan().fill_null(False)
    return pl.when(lacking).then(pl.lit(0, pl.Float32)).when(number.is_finite()).then(number)


def _one_per_value(
    table: LogTable, name: str, text: pl.Expr, missing: pl.Expr
) -> list[ActionColumn]:
    distinct = table.frame.filter(~missing).select(text.alias("text")).unique()
    values = distinct.head(10 * MOST_VALUES).collect(engine="streaming")["text"].sort().to_list()
    if len(values) > MOST_VALUES:
        raise SlipstreamError(
            f"action column '{name}' holds more than {MOST_VALUES} different texts "
            f"('{values[0]}', '{values[1]}', …); give their numbers with --action-values, or leave "
            "the column out"
        )
    return [
        ActionColumn(f"{name}={value}", name, (text == value).fill_null(False).cast(pl.Float32))
        for value in values
    ]
