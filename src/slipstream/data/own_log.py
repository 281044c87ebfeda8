"""A user's own log: the table, the columns by role, the features that come with it.

Touch this when own data may come in another shape; formats are in log_files.py.
"""

import os
from collections.abc import Iterable
from dataclasses import asdict, replace

import polars as pl

from slipstream.data.choices import Choices, FeatureFile, TableSource
from slipstream.data.feature_columns import FeatureTable, feature_names, first_values
from slipstream.data.ingest import BATCH_ROWS
from slipstream.data.log_files import (
    LogTable,
    explain_polars_errors,
    is_frame,
    open_files,
    open_frame,
)
from slipstream.data.log_ids import id_expression
from slipstream.data.log_times import likely_time_column
from slipstream.data.raw_log import Columns, RawLog
from slipstream.data.store import FEATURE
from slipstream.errors import SlipstreamError


def open_table(source: TableSource, wanted: Iterable[str] = ()) -> LogTable:
    """Open a frame, or files, as a table."""
    if is_frame(source):
        return open_frame(source)
    return open_files(paths_of(source), wanted)


def paths_of(source: TableSource) -> list[str | os.PathLike[str]]:
    """Return the paths, folders and patterns that a source names; a frame has none."""
    if is_frame(source):
        return []
    given = [source] if isinstance(source, str | os.PathLike) else source
    if not isinstance(given, list | tuple) or not given:
        raise SlipstreamError(
            f"a log is a path, several paths or a data frame, got {type(source).__name__}"
        )
    return list(given)


def log_columns(choices: Choices) -> list[str]:
    """Return the columns of the log that the choices name."""
    columns = choices.columns
    named = [columns.user, columns.item, *columns.actions, *columns.context]
    more = [columns.time, columns.title]
    for each in (choices.items, choices.users):
        if each is not None and each.data is None:
            more += [*feature_names(each.features), each.title]
    return named + [name for name in more if name is not None]


def open_own_log(table: LogTable, choices: Choices) -> RawLog:
    """Open a table as a log, with the features of its items and users."""
    with explain_polars_errors(table.label):
        schema = table.frame.collect_schema()
    columns = with_time_or_without(choices.columns, schema)
    for role, name in (("user", columns.user), ("item", columns.item)):
        table.require(name, role)
    items = choices.items or FeatureFile()
    if items.title is None and columns.title is not None:
        items = _with_title(items, columns.title)
    named = asdict(columns) | {"actions": list(columns.actions)}
    named |= {"context": list(columns.context)}
    facts = {"name": table.label, "path": table.label, "files": len(table.paths), "columns": named}
    facts["choices"] = {
        "time_unit": choices.time_unit,
        "nulls": choices.nulls,
        "duplicates": choices.duplicates,
        "action_values": None if choices.action_values is None else dict(choices.action_values),
        "items": _recorded(items),
        "users": _recorded(choices.users or FeatureFile()),
    }
    return RawLog(
        table.frame,
        columns,
        time_unit=choices.time_unit,
        items=_features(table, columns.item, items, "item"),
        users=_features(table, columns.user, choices.users or FeatureFile(), "user"),
        source=facts | ({"separator": table.separator} if table.separator else {}),
        untyped=table.untyped,
        nulls=choices.nulls or "drop",
        duplicates=choices.duplicates or ("keep" if columns.time is None else "drop"),
        action_values=choices.action_values,
        table=table,
    )


def _recorded(features: FeatureFile) -> dict[str, object]:
    """Return what a later log of the same kind must know of the features."""
    kept = {"id": features.id, "title": features.title, "separator": features.separator}
    return kept | {"file": features.data is not None}


def _with_title(items: FeatureFile, title: str) -> FeatureFile:
    if items.data is not None:
        raise SlipstreamError(
            "the items have a file of their own; name its column of titles with --item-title, not "
            "--title-column"
        )
    return replace(items, title=title)


def with_time_or_without(columns: Columns, schema: pl.Schema) -> Columns:
    """Return the columns, without the time if it is optional and the log lacks it."""
    if not columns.time_optional or columns.time is None or columns.time in schema:
        return columns
    likely = likely_time_column(
        schema, {columns.user, columns.item, *columns.actions, *columns.context}
    )
    if likely is not None:
        raise SlipstreamError(
            f"the log has no column '{columns.time}', but '{likely}' looks like a time; give "
            f"--time-column {likely}, or --time-column none if the order of rows is the order"
        )
    return replace(columns, time=None)


def _features(table: LogTable, ids: str, chosen: FeatureFile, role: str) -> FeatureTable | None:
    """Open the features of items or users: of their own table, or of the log."""
    kinds = feature_names(chosen.features)
    renamed = {f"{FEATURE}{name}": name for name in kinds}
    renamed |= {"title": chosen.title} if chosen.title else {}
    if not renamed:
        if chosen.data is not None:
            raise SlipstreamError(
                f"a file of {role}s is given, but none of its columns; name some with "
                f"--{role}-features" + (" or --item-title" if role == "item" else "")
            )
        return None
    key = chosen.id or ids
    source = table if chosen.data is None else open_table(chosen.data, [key, *renamed.values()])
    source.require(key, f"{role} id")
    for new, name in renamed.items():
        source.require(name, f"{role}'s title" if new == "title" else f"{role} feature")
    with explain_polars_errors(source.label):
        if chosen.data is None:
            id_type = source.frame.collect_schema()[key]
            values = id_expression(key, id_type, role)
            frame = first_values(source.frame, values, renamed, BATCH_ROWS)
        else:
            frame = source.frame.select(
                pl.col(key).alias("id"), *[pl.col(name).alias(new) for new, name in renamed.items()]
            )
    given = {name: kind for name, kind in kinds.items() if kind is not None}
    return FeatureTable(frame, source.label, given, chosen.separator, source.untyped)
