"""Ids of users and items: whole numbers or text, from columns of any type that can hold them.

Touch this to accept another kind of id. An id is a whole number of 64 signed bits or a text of 1 to
256 characters. A decimal column of whole numbers (`12.0`) holds the numbers it means. CSV has no
types: there the whole column decides, and `12`, `12.0` are the same id.
"""

from typing import Any

import polars as pl

from slipstream.errors import SlipstreamError

LARGEST = (1 << 63) - 1
LONGEST_ID = 256
PLAIN = r"^(0|-?[1-9][0-9]*)$"
WHOLE = r"^(0|-?[1-9][0-9]*)(\.0+)?$"
NUMBER = r"^-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?$"
TEXT_TYPES = (pl.String, pl.Categorical, pl.Enum)


def id_expression(name: str, dtype: pl.DataType, role: str) -> pl.Expr:
    """Return ids as int64 or text; null where there is none or it cannot be an id."""
    column = pl.col(name)
    if dtype.is_integer():
        return column.cast(pl.Int64, strict=False)
    if dtype.is_float():
        exact = 1 << (24 if dtype == pl.Float32 else 53)  # beyond, digits are lost already
        whole = (column == column.floor()) & (column.abs() <= exact)
        return pl.when(whole).then(column.cast(pl.Int64, strict=False))
    if dtype.is_decimal():
        whole = column.cast(pl.Int64, strict=False)
        return pl.when(whole.cast(dtype, strict=False) == column).then(whole)
    if dtype in TEXT_TYPES:
        text = column.cast(pl.String)
        return pl.when(text != "").then(text)
    if dtype == pl.Null:
        return column.cast(pl.Int64)
    raise SlipstreamError(
        f"{role} column '{name}' holds {dtype}, but ids must be whole numbers or text; convert "
        "the column first"
    )


def missing_expression(name: str, dtype: pl.DataType) -> pl.Expr:
    """Return where a value lacks: null, an empty text, or a float that is not a number."""
    column = pl.col(name)
    if dtype in TEXT_TYPES:
        return column.is_null() | (column.cast(pl.String) == "").fill_null(False)
    if dtype.is_float():
        return column.is_null() | column.is_nan().fill_null(False)
    return column.is_null()


def unusable_ids(ids: pl.Series, untyped: bool, text: pl.Expr) -> list[tuple[str, pl.Expr]]:
    """Return what is wrong with some ids of a vocabulary: the reason, and where `text` has them."""
    if ids.dtype != pl.String:
        return []
    found = []
    if (ids.str.len_chars() > LONGEST_ID).any():
        too_long = text.str.len_chars() > LONGEST_ID
        found.append((f"has ids longer than {LONGEST_ID} characters", too_long))
    if not untyped or not len(ids):
        return found
    if ids.str.contains(WHOLE).all():
        if whole_numbers(ids).null_count():
            found.append((f"has ids larger than {LARGEST}", whole_numbers(text).is_null()))
    elif ids.str.contains(NUMBER).all():
        found.append(("has decimals, which cannot be ids", ~text.str.contains(WHOLE)))
    return found


def whole_numbers(text: Any) -> Any:
    """Return texts such as 12 and 12.0 as int64; null where a text is another one."""
    return text.str.replace(r"\.0+$", "").cast(pl.Int64, strict=False)


def order_ids(counts: pl.DataFrame, untyped: bool) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Sort a vocabulary by id; untyped text becomes numbers if all of it is whole numbers.

    `counts` has `id` as the log has it, and `count`. Returns the vocabulary (`id`, `count`) and the
    row of every `key`, which is the id as the log has it.
    """
    keys = counts.with_columns(key=pl.col("id"))
    if untyped and counts.schema["id"] == pl.String and counts["id"].str.contains(WHOLE).all():
        keys = keys.with_columns(id=whole_numbers(counts["id"]))
        if not counts["id"].str.contains(PLAIN).all():  # 12 and 12.0 may both be there
            merged = keys.group_by("id").agg(pl.col("count").sum()).sort("id")
            rows = merged.select("id", row=pl.int_range(pl.len(), dtype=pl.Int64))
            return merged, keys.join(rows, on="id").select("key", "row").sort("row")
    keys = keys.sort("id").with_columns(row=pl.int_range(pl.len(), dtype=pl.Int64))
    return keys.select("id", "count"), keys.select("key", "row")
