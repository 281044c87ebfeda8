"""Features of items and users: from a file, a frame or the log itself to columns of a vocabulary.

Touch this when features get another kind. A feature is one category a row, several categories a
row, or a number. Unless the user says which, text, true/false and whole numbers of few different
values are categories; lists and text with the separator are several; other numbers are numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from slipstream.data.log_ids import TEXT_TYPES, WHOLE, whole_numbers
from slipstream.data.store import FEATURE, FEATURE_KINDS
from slipstream.errors import SlipstreamError, did_you_mean

FEW_VALUES = 256  # whole numbers of more different values are numbers, not categories
SHOWN = 3


@dataclass(frozen=True)
class FeatureTable:
    """Facts by id: `frame` has `id`, perhaps `title`, and the features as `feature:<name>`.

    `kinds` has the kind of a feature where the user chose one.
    """

    frame: pl.LazyFrame
    label: str = "the data"
    kinds: Mapping[str, str] = field(default_factory=dict)
    separator: str | None = None  # between the categories of a text
    untyped: bool = False  # as in CSV: every column is text


def split_kind(feature: str) -> tuple[str, str | None]:
    """Split `price:number` into the column and the kind; no kind: it depends on the values."""
    name, colon, kind = feature.rpartition(":")
    if not colon:
        return feature, None
    if kind not in FEATURE_KINDS:
        raise SlipstreamError(
            f"unknown kind '{kind}' of feature '{name}'{did_you_mean(kind, FEATURE_KINDS)}"
        )
    return name, kind


def vocabulary_table(
    ids: pl.Series, known: pl.LazyFrame | FeatureTable | None
) -> tuple[pa.Table, dict[str, Any]]:
    """Make the Arrow table of a vocabulary: `ids` in order, titles and features from `known`.

    Returns also how many rows of `known` are about no id, repeat an id, and how many ids lack one.
    """
    columns: dict[str, Any] = {
        "id": ids.to_arrow().cast(pa.int64() if ids.dtype == pl.Int64 else pa.large_string())
    }
    if known is None:
        return pa.table(columns), {}
    table = known if isinstance(known, FeatureTable) else None
    frame = known.frame if isinstance(known, FeatureTable) else known
    wanted = pl.LazyFrame({"id": ids.cast(pl.String)})
    frame = frame.with_columns(id=id_text(frame.collect_schema()["id"], ids.dtype == pl.Int64))
    rows, found = pl.collect_all(
        [
            frame.select(pl.len()),
            frame.with_row_index("#row").join(wanted, on="id", how="semi"),
        ],
        engine="streaming",
    )
    first = found.sort("#row").unique("id", keep="first", maintain_order=True).drop("#row")
    joined = wanted.collect().join(first, on="id", how="left", maintain_order="left")
    if "title" in joined.columns:
        columns["title"] = joined["title"].cast(pl.String).to_arrow().cast(pa.large_string())
    for name in [name for name in joined.columns if name not in ("id", "title")]:
        plain = name.removeprefix(FEATURE)
        values = joined[name]
        columns[f"{FEATURE}{plain}"] = (
            encode_categories(values) if table is None else encode_feature(values, plain, table)
        )
    facts = {
        "rows": int(rows.item()),
        "not_in_the_log": int(rows.item()) - len(found),
        "repeated": len(found) - len(first),
        "without_a_row": len(ids) - len(first),
    }
    return pa.table(columns), facts


def id_text(dtype: pl.DataType, numeric: bool) -> pl.Expr:
    """Return the ids of a table of features as text, spelled as the vocabulary's ids are."""
    column = pl.col("id")
    if dtype.is_float() or dtype.is_decimal():
        return (
            pl.when(column == column.floor())
            .then(column.cast(pl.Int64, strict=False))
            .cast(pl.String)
        )
    text = column.cast(pl.String)
    if numeric and dtype in TEXT_TYPES:
        return pl.when(text.str.contains(WHOLE)).then(whole_numbers(text)).cast(pl.String)
    return text


def encode_feature(values: pl.Series, name: str, table: FeatureTable) -> pa.Array:
    """Encode a feature as its kind, which is the user's choice or follows from the values."""
    if table.untyped or values.dtype in TEXT_TYPES:
        values = values.cast(pl.String).replace("", None)
    if isinstance(values.dtype, pl.Array):
        values = values.arr.to_list()
    _check_type(values, name, table)
    kind = table.kinds.get(name) or _kind_of(values, table)
    if kind == "number":
        return encode_numbers(values, name, table)
    if kind == "category":
        if isinstance(values.dtype, pl.List):
            raise SlipstreamError(
                f"feature '{name}' of {table.label} holds lists; write {name}:categories"
            )
        return encode_categories(values)
    return encode_several(values, name, table)


def _check_type(values: pl.Series, name: str, table: FeatureTable) -> None:
    inner = values.dtype.inner if isinstance(values.dtype, pl.List) else values.dtype
    usable = inner in (pl.Boolean, pl.Null, *TEXT_TYPES) or inner.is_numeric()
    if not usable:
        raise SlipstreamError(
            f"feature '{name}' of {table.label} holds {values.dtype}, but features are text, "
            "true/false, numbers or lists of them; convert the column first"
        )


def _kind_of(values: pl.Series, table: FeatureTable) -> str:
    if isinstance(values.dtype, pl.List):
        return "categories"
    if values.dtype in TEXT_TYPES:
        text, separator = values.cast(pl.String).drop_nulls(), table.separator
        if separator and text.str.contains(separator, literal=True).any():
            return "categories"
        numbers = text.str.strip_chars().cast(pl.Float64, strict=False)
        if not table.untyped or not len(text) or numbers.null_count():
            return "category"
        if not text.str.contains(WHOLE).all():
            return "number"
    elif values.dtype.is_float() or values.dtype.is_decimal():
        return "number"
    few = values.dtype == pl.Boolean or values.drop_nulls().n_unique() <= FEW_VALUES
    return "category" if few else "number"


def encode_numbers(values: pl.Series, name: str, table: FeatureTable) -> pa.Array:
    """Encode numbers as float32; what is not known is not a number (NaN)."""
    if isinstance(values.dtype, pl.List):
        raise SlipstreamError(f"feature '{name}' of {table.label} holds lists, so it is no number")
    numbers = values
    if values.dtype in TEXT_TYPES:
        numbers = values.cast(pl.String).str.strip_chars().cast(pl.Float64, strict=False)
        bad = values.filter(numbers.is_null() & values.is_not_null())
        if len(bad):
            shown = ", ".join(f"'{value}'" for value in bad.head(SHOWN).to_list())
            raise SlipstreamError(
                f"feature '{name}' of {table.label} is to be a number, but {len(bad):,} values are "
                f"none ({shown}); mend them, or write {name}:category"
            )
    single = numbers.cast(pl.Float64).fill_null(float("nan")).to_numpy().astype(np.float32)
    return pa.array(np.where(np.isfinite(single), single, np.float32("nan")))


def encode_categories(values: pl.Series) -> pa.DictionaryArray:
    """Encode one category a row: 0 for unknown, then the labels in ascending order."""
    codes, dictionary = _codes(values.cast(pl.String))
    return pa.DictionaryArray.from_arrays(codes, dictionary)


def encode_several(values: pl.Series, name: str, table: FeatureTable) -> pa.LargeListArray:
    """Encode several categories a row; a row of which nothing is known has none."""
    if not isinstance(values.dtype, pl.List):
        if table.separator is None:
            raise SlipstreamError(
                f"feature '{name}' of {table.label} is to have several categories a row; give "
                "--multi-separator, or a column of lists"
            )
        values = values.cast(pl.String).str.split(table.separator)
    texts = values.cast(pl.List(pl.String)).list.eval(pl.element().str.strip_chars())
    texts = texts.list.eval(pl.element().filter(pl.element() != "")).list.unique(
        maintain_order=True
    )
    lengths = texts.list.len().fill_null(0).to_numpy().astype(np.int64)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    flat = texts.filter(texts.list.len() > 0).explode()
    codes, dictionary = _codes(flat)
    return pa.LargeListArray.from_arrays(
        pa.array(offsets), pa.DictionaryArray.from_arrays(codes, dictionary)
    )


def _codes(text: pl.Series) -> tuple[pa.Array, pa.Array]:
    """Return the code of every text, 0 for none, and the label of every code."""
    labels = text.drop_nulls().unique().sort()
    codes = text.to_frame("label").join(
        pl.DataFrame({"label": labels, "code": np.arange(1, len(labels) + 1)}),
        on="label",
        how="left",
        maintain_order="left",
    )["code"]
    indices = pa.array(codes.fill_null(0).to_numpy().astype(np.int64))
    return indices, pa.array(["", *labels.to_list()], type=pa.large_string())


def first_values(
    frame: pl.LazyFrame, ids: pl.Expr, columns: Mapping[str, str], batch_rows: int
) -> pl.LazyFrame:
    """Return, for every id of a log, the first value of each column; null where all are.

    `columns` are new names and the log's names. Memory grows with the ids, not with the log.
    """
    schema = frame.collect_schema()
    selected = frame.select(
        ids.alias("#id"),
        *[
            pl.when(pl.col(column) != "").then(pl.col(column)).alias(name)
            if schema[column] == pl.String
            else pl.col(column).alias(name)
            for name, column in columns.items()
        ],
    )
    empty = pl.DataFrame(schema=selected.collect_schema())
    known = {name: empty.select("#id", name) for name in columns}
    for batch in selected.collect_batches(
        chunk_size=batch_rows, maintain_order=True, engine="streaming"
    ):
        for name in columns:
            new = batch.select("#id", name).drop_nulls()
            new = new.unique("#id", keep="first", maintain_order=True)
            new = new.join(known[name], on="#id", how="anti")
            known[name] = pl.concat([known[name], new])
    all_ids = pl.concat([part.select("#id") for part in known.values()]).unique()
    for part in known.values():
        all_ids = all_ids.join(part, on="#id", how="left")
    return all_ids.lazy().rename({"#id": "id"})


def feature_names(features: Sequence[str]) -> dict[str, str | None]:
    """Return the columns of a list such as ["category", "price:number"], and their kinds."""
    names = [split_kind(feature) for feature in features]
    twice = [name for name, _ in names if [other for other, _ in names].count(name) > 1]
    if twice:
        raise SlipstreamError(f"feature '{twice[0]}' is named twice; name each once")
    return dict(names)
