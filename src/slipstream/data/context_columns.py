"""Context columns of a log: what surrounded each behaviour, such as device and surface.

A context column holds one category a behaviour: text, true/false, or whole numbers of few different
values. Code 0 is "unknown"; the labels of the log follow, ascending. Touch this when context gets
another kind.
"""

from collections.abc import Sequence

import numpy as np
import polars as pl
import pyarrow as pa

from slipstream.data.feature_columns import FEW_VALUES
from slipstream.data.log_ids import TEXT_TYPES, WHOLE
from slipstream.data.store import CONTEXT, Feature
from slipstream.errors import SlipstreamError

MOST_LABELS = 1 << 16
UNKNOWN = ""  # the text of what is not known, and the label of code 0


def context_texts(schema: pl.Schema, names: Sequence[str]) -> dict[str, pl.Expr]:
    """Return the text of every behaviour by canonical column; refuse what is no category."""
    found = {}
    for name in names:
        dtype = schema[name]
        if dtype.is_float() or dtype.is_decimal():
            raise _is_a_number(name)
        if dtype not in (pl.Boolean, pl.Null, *TEXT_TYPES) and not dtype.is_integer():
            raise SlipstreamError(
                f"context column '{name}' holds {dtype}, but context is text, true/false or a few "
                "whole numbers; convert the column first"
            )
        found[f"{CONTEXT}{name}"] = pl.col(name).cast(pl.String).fill_null(UNKNOWN)
    return found


def order_labels(name: str, texts: pl.Series, numeric: bool) -> list[str]:
    """Return the different labels of a context column, ascending; refuse those of numbers.

    `numeric`: what looks like a number is one, as in CSV or in a column of whole numbers.
    """
    labels = texts.filter(texts != UNKNOWN).unique().sort()
    if len(labels) > MOST_LABELS:
        raise SlipstreamError(
            f"context column '{name}' has {len(labels):,} different values, but at most "
            f"{MOST_LABELS:,} are categories; leave the column out, or group its values"
        )
    if numeric and len(labels):
        numbers = not labels.str.strip_chars().cast(pl.Float64, strict=False).null_count()
        if numbers and (len(labels) > FEW_VALUES or not labels.str.contains(WHOLE).all()):
            raise _is_a_number(name)
    return labels.to_list()


def _is_a_number(name: str) -> SlipstreamError:
    return SlipstreamError(
        f"context column '{name}' holds numbers, but context is a category; bin them first, or "
        "leave the column out"
    )


def code_expression(column: str, labels: Sequence[str]) -> pl.Expr:
    """Return the codes of a column of texts, 0 for what is not known."""
    place = pl.col(column).cast(pl.Enum(labels), strict=False).to_physical()
    return (place.cast(pl.Int32) + 1).fill_null(0).alias(column)


def context_feature(codes_N: np.ndarray, labels: Sequence[str]) -> Feature:
    """Return codes of all behaviours and the labels of the codes from 1 on as a column."""
    dictionary = pa.array([UNKNOWN, *labels], type=pa.large_string())
    return Feature("category", codes_N, None, None, len(dictionary), dictionary)


def grown_context(base: Feature | None, new: Feature | None) -> tuple[list[str], np.ndarray]:
    """Return the labels of both columns, the new ones last, and the code of each new label."""
    known = [UNKNOWN] if base is None else base.labels.to_pylist()
    code_of = {label: code for code, label in enumerate(known)}
    others = [UNKNOWN] if new is None else new.labels.to_pylist()
    translate = [code_of.setdefault(label, len(code_of)) for label in others]
    return list(code_of)[1:], np.array(translate, dtype=np.int32)
