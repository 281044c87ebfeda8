"""All that is wrong with a log, in one report: how often, and the first three rows of each kind.

Touch this to check values of a log differently. The log is read for the report only when a cheap
count has shown that there is something to report.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import polars as pl

from slipstream.data.log_times import LAST_SECOND
from slipstream.data.raw_log import RawLog
from slipstream.data.store import ACTION
from slipstream.errors import SlipstreamError

SHOWN = 3
LONGEST_SHOWN = 40
IDS_ADVICE = "ids are whole numbers of 64 signed bits, or text of 1 to 256 characters"


@dataclass(frozen=True)
class LogProblem:
    """A kind of problem: the column as the log calls it, what is wrong, where, what to do."""

    role: str
    column: str
    reason: str
    bad: pl.Expr
    advice: str = "mend or drop such rows"


def examine(log: RawLog, ids: Iterable[LogProblem] = ()) -> dict[str, int]:
    """Raise with every problem of the log; returns how many rows lack which column, by its name.

    `ids` are problems that only the whole vocabulary shows.
    """
    kinds = [*_problems(log), *ids]
    missing = {log.columns.roles()[role]: where for role, where in log.missing().items()}
    if log.nulls == "drop":  # what is wrong with a row that is dropped does not matter
        complete = ~pl.any_horizontal(*missing.values())
        kinds = [
            LogProblem(kind.role, kind.column, kind.reason, kind.bad & complete, kind.advice)
            for kind in kinds
        ]
    counts = log.raw.select(
        *[kind.bad.fill_null(False).sum().alias(f"bad {n}") for n, kind in enumerate(kinds)],
        *[where.sum().alias(f"missing {name}") for name, where in missing.items()],
    )
    row = counts.collect(engine="streaming").row(0, named=True)
    found = [(kind, row[f"bad {n}"]) for n, kind in enumerate(kinds) if row[f"bad {n}"]]
    if found:
        raise SlipstreamError(_report(log, found))
    return {name: int(row[f"missing {name}"]) for name in missing}


def _problems(log: RawLog) -> list[LogProblem]:
    expressions, missing = log.expressions(), log.missing()
    kinds = []
    for role, column in log.columns.roles().items():
        if log.nulls == "error":
            advice = "fill it in, or drop such rows with --nulls drop"
            kinds.append(LogProblem(role, column, "is empty", missing[role], advice))
        unread = expressions[role].is_null() & ~missing[role]
        if role != "time":
            reason = (
                "has ids beyond 64 signed bits"
                if log.schema[column].is_integer()
                else "has decimals, which cannot be ids"
            )
            kinds.append(LogProblem(role, column, reason, unread, IDS_ADVICE))
        else:
            kinds += [LogProblem(role, column, "has values that are no usable times", unread)]
            kinds += _time_problems(log, column, expressions["time"])
    for action in log.actions:
        bad = expressions[f"{ACTION}{action.name}"].is_null()
        kinds.append(LogProblem("action", action.column, action.reason, bad))
    return kinds


def _time_problems(log: RawLog, column: str, time: pl.Expr) -> list[LogProblem]:
    unit, least = log.time.unit, log.time.least
    kinds = [
        LogProblem("time", column, "is negative: times count from 1970", time < 0),
        LogProblem(
            "time",
            column,
            f"is beyond the year 9999 when read in '{unit}'",
            time > LAST_SECOND * log.per_second,
            "give the right --time-unit (s, ms, us or ns)",
        ),
    ]
    if least:
        kinds.append(
            LogProblem(
                "time",
                column,
                f"is before 1973 when read in '{unit}', as most of its values look",
                (time >= 0) & (time < least),
                f"mend such rows, or give --time-unit {unit} if they are meant",
            )
        )
    return kinds


def _report(log: RawLog, found: list[tuple[LogProblem, int]]) -> str:
    """Write a sentence for one kind of problem, a list for several."""
    firsts = [
        log.raw.with_row_index("#row")
        .filter(kind.bad)
        .head(SHOWN)
        .select("#row", pl.col(kind.column).alias("#value"))
        for kind, _ in found
    ]
    lines = []
    for (kind, count), rows in zip(found, pl.collect_all(firsts, engine="streaming"), strict=True):
        shown = [_value(value) + log.table.place(row + 1) for row, value in rows.rows()]
        more = f" and {count - len(shown):,} more" if count > len(shown) else ""
        lines.append(
            f"{kind.role} column '{kind.column}' {kind.reason} ({', '.join(shown)}{more}); "
            f"{kind.advice}"
        )
    if len(lines) == 1:
        return f"{log.label}: {lines[0]}"
    return "\n".join(
        [f"{log.label} has {len(lines)} kinds of problem, so nothing was written:"]
        + [f"  - {line}" for line in lines]
    )


def _value(value: Any) -> str:
    if value is None or value == "":
        return ""
    text = str(value)
    return f"'{text[:LONGEST_SHOWN] + '…' if len(text) > LONGEST_SHOWN else text}' in "
