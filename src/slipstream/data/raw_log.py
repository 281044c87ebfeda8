"""A log that is not read yet: a lazy frame, its columns by role, facts about items and users.

Touch this when a log gets another role of a column. Only schemas and the first values are read
here; how each kind of column is read stands in log_ids.py, log_times.py and log_actions.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from slipstream.data.context_columns import context_texts
from slipstream.data.feature_columns import FeatureTable
from slipstream.data.log_actions import ActionColumn, read_action_columns
from slipstream.data.log_files import LogTable, explain_polars_errors
from slipstream.data.log_ids import id_expression, missing_expression
from slipstream.data.log_times import TimeColumn, read_time_column
from slipstream.data.store import ACTION
from slipstream.errors import SlipstreamError, did_you_mean

Progress = Callable[[str, int, int], None]  # (what is being done, done so far, total)


@dataclass(frozen=True)
class Columns:
    """The names of a log's columns by role.

    `time` is None for a log without times: the order of its rows is the order of the behaviours.
    With `time_optional` an own log that lacks the column is such a log.
    """

    user: str
    item: str
    time: str | None
    actions: tuple[str, ...] = ()
    title: str | None = None
    time_optional: bool = False
    context: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        actions = (self.actions,) if isinstance(self.actions, str) else tuple(self.actions)
        object.__setattr__(self, "actions", actions)
        context = (self.context,) if isinstance(self.context, str) else tuple(self.context)
        object.__setattr__(self, "context", context)
        named = [self.user, self.item, *self.actions] + ([self.time] if self.time else [])
        if len(set(named)) < len(named):
            raise SlipstreamError(
                "user, item, time and action columns must be different columns, each named once"
            )
        if len(set(context)) < len(context):
            raise SlipstreamError("a context column is named twice; name each once")

    def roles(self) -> dict[str, str]:
        """Return the names of the columns that every row must fill, by role."""
        named = {"user": self.user, "item": self.item}
        return named | {"time": self.time} if self.time else named


@dataclass(frozen=True)
class RawLog:
    """A log that is not read yet.

    `items` and `users` have a column `id`, perhaps a `title`, and features by name. `nulls` and
    `duplicates` say what becomes of incomplete rows ("drop" or "error") and of rows that repeat
    another one exactly ("drop" or "keep").
    """

    raw: pl.LazyFrame
    columns: Columns
    time_unit: str | None = "s"  # None: found from the values
    items: pl.LazyFrame | FeatureTable | None = None
    users: pl.LazyFrame | FeatureTable | None = None
    source: dict[str, Any] = field(default_factory=dict)
    untyped: bool = True  # as in CSV: ids that are all whole numbers are numbers
    text_ids: frozenset[str] = frozenset()  # roles whose ids are text, whatever they look like
    nulls: str = "error"
    duplicates: str = "keep"
    action_values: Mapping[str, float] | None = None
    table: LogTable = field(default=None)  # type: ignore[assignment]  # made of `raw` unless given
    schema: pl.Schema = field(init=False)
    time: TimeColumn = field(init=False)
    actions: tuple[ActionColumn, ...] = field(init=False)
    context: Mapping[str, pl.Expr] = field(init=False)  # texts by canonical column

    def __post_init__(self) -> None:
        def fill_in(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        if self.table is None:
            fill_in("table", LogTable(self.raw, self.label, self.untyped))
        with explain_polars_errors(self.label):
            fill_in("schema", self.raw.collect_schema())
        wanted = self.columns.roles() | {f"action {name}": name for name in self.columns.actions}
        wanted |= {f"context {name}": name for name in self.columns.context}
        wanted |= {"title": self.columns.title} if self.columns.title else {}
        for role, name in wanted.items():
            if name not in self.schema:
                raise SlipstreamError(
                    f"the log has no column '{name}' for the "
                    f"{role.split()[0]}{did_you_mean(name, self.schema.names())}"
                )
        fill_in("time", read_time_column(self.table, self.columns.time, self.time_unit))
        actions = read_action_columns(self.table, self.columns.actions, self.action_values)
        fill_in("actions", actions)
        fill_in("context", context_texts(self.schema, self.columns.context))

    @property
    def label(self) -> str:
        return str(self.source.get("path", "the log"))

    def expressions(self) -> dict[str, pl.Expr]:
        """Return the canonical columns.

        `user` and `item` (int64 or text), `time` (int64, `time.per_second` to a second),
        `action:<name>` (float32), `context:<name>` (text, empty where it is not known).
        """
        named = {
            role: id_expression(name, self.schema[name], role)
            for role, name in (("user", self.columns.user), ("item", self.columns.item))
        }
        time_type = self.schema[self.time.name] if self.time.name else None
        named["time"] = self.time.expression(time_type)
        named |= {f"{ACTION}{each.name}": each.values for each in self.actions}
        return named | dict(self.context)

    def guesses_ids(self, role: str) -> bool:
        """Whether ids of a role that are all whole numbers are numbers, though they are text."""
        return self.untyped and role not in self.text_ids

    def missing(self) -> dict[str, pl.Expr]:
        """Return where a row lacks what it must have, by role."""
        return {
            role: missing_expression(name, self.schema[name])
            for role, name in self.columns.roles().items()
        }

    @property
    def frame(self) -> pl.LazyFrame:
        return self.raw.select(**self.expressions())

    @property
    def per_second(self) -> int:
        """Return how many units of the canonical time column make a second."""
        return self.time.per_second
