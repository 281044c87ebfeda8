"""Turns a raw log into a sequence store, in memory that does not grow with the log.

Touch this when filters, order or encoding of a log change. There are three passes. Polars streams
the log once to count users and items and to check every value (and once more, if rows lack a user,
an item or a time and are dropped). It streams the log again, and each behaviour is written to its
user's place in scratch columns (a counting sort: stable, in file order). The third pass reads those
columns block by block, drops exact duplicates, applies the filters and sorts each user's behaviours
by time, stably: equal times stay in file order. Scratch columns beyond IN_MEMORY bytes are mapped
files, so only the vocabularies and a block or two must fit in memory.

Users of any length >= 1 are kept. A user with fewer than three behaviours cannot be split into
training, validation and test: such users count as `unsplittable_users` in store.json; they are used
in training and not evaluated.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import polars as pl

from slipstream.data.context_columns import code_expression, context_feature, order_labels
from slipstream.data.feature_columns import vocabulary_table
from slipstream.data.log_files import explain_polars_errors
from slipstream.data.log_ids import order_ids, unusable_ids
from slipstream.data.log_problems import IDS_ADVICE, LogProblem, examine
from slipstream.data.log_times import LAST_SECOND
from slipstream.data.raw_log import Progress, RawLog
from slipstream.data.row_lookup import RowLookup
from slipstream.data.store import ACTION, CONTEXT, write_store
from slipstream.errors import SlipstreamError

BATCH_ROWS = 1 << 18
BLOCK_ROWS = 1 << 20
IN_MEMORY = 1 << 30
ORDER = "stable"  # by time, then by place in the file


@dataclass(frozen=True)
class Filters:
    """Minimum counts: first of items, then of users, once each; then the k-core is computed."""

    min_item_count: int = 1
    min_user_count: int = 1
    k_core: int = 1


def ingest(
    log: RawLog, directory: Path, filters: Filters, *, progress: Progress | None = None
) -> None:
    """Write the store of `log` into `directory`, which must be empty."""
    report = progress or (lambda what, done, total: None)
    report("counting users and items", 0, 1)
    with explain_polars_errors(log.label):
        counted = _count(log)
        rows = counted.rows - counted.nulls
        actions = [f"{ACTION}{each.name}" for each in log.actions]
        arrays = ScratchColumns(directory, rows, actions, list(log.context))
        offsets_U1 = _offsets(counted.users["count"].to_numpy())
        _scatter(counted, offsets_U1, arrays, report)
    drop = log.duplicates == "drop"
    if drop and filters != Filters():  # duplicates must not count for the filters
        everyone_U, everything_V = _all(counted.users), _all(counted.items)
        offsets_U1 = _sort_and_compact(arrays, offsets_U1, everyone_U, everything_V, True, report)
        drop = False
    keep_users_U, keep_items_V, kept = _apply_filters(
        arrays.item_N, offsets_U1, len(counted.items), filters
    )
    duplicates = rows - int(offsets_U1[-1])
    offsets_U1 = _sort_and_compact(arrays, offsets_U1, keep_users_U, keep_items_V, drop, report)
    duplicates += kept - int(offsets_U1[-1])
    kept = int(offsets_U1[-1])
    if log.per_second > 1:
        arrays.time_N[:kept] //= log.per_second
    report("writing", 0, 1)
    item_table, item_facts = vocabulary_table(
        counted.items.filter(pl.Series(keep_items_V))["id"], log.items
    )
    user_table, user_facts = vocabulary_table(
        counted.users.filter(pl.Series(keep_users_U))["id"], log.users
    )
    meta = {
        "order": ORDER,
        "filters": asdict(filters),
        "time_unit": "s",
        "timed": log.columns.time is not None,
        "actions": sorted(each.name for each in log.actions),
        "unsplittable_users": int((np.diff(offsets_U1) < 3).sum()),
        "rows_read": counted.rows,
        "source": log.source
        | {"time_format": log.time.format, "nulls": counted.nulls, "duplicates": duplicates}
        | {"nulls_by_column": counted.missing}
        | {"item_rows": item_facts, "user_rows": user_facts},
    }
    write_store(
        directory,
        offsets_U1,
        arrays.item_N[:kept],
        arrays.time_N[:kept],
        {each.name: arrays.actions[f"{ACTION}{each.name}"][:kept] for each in log.actions},
        item_table,
        user_table,
        meta,
        {
            name.removeprefix(CONTEXT): context_feature(arrays.context[name][:kept], labels)
            for name, labels in counted.context.items()
        },
    )
    arrays.remove()


def _all(vocabulary: pl.DataFrame) -> np.ndarray:
    return np.ones(len(vocabulary), dtype=bool)


@dataclass(frozen=True)
class _Counted:
    """A log whose values are all usable: its rows, its users and items, ascending by id."""

    frame: pl.LazyFrame  # canonical columns, without the rows that are dropped
    users: pl.DataFrame  # id, count
    items: pl.DataFrame
    keys: dict[str, pl.DataFrame]  # by role: key (the id as the log has it), row
    rows: int  # all, before any is dropped
    nulls: int
    missing: dict[str, int]  # rows that lack a column, by its name
    context: dict[str, list[str]]  # the labels of each context column


def _count(log: RawLog) -> _Counted:
    """Check all values and count users and items, ascending by id."""
    frame, missing = log.frame, {}
    facts, counts = _count_rows(log, frame)
    if facts["rows"] == 0:
        raise SlipstreamError(f"{log.label} is empty: there is nothing to prepare")
    rows = facts["rows"]
    problems = _id_problems(log, counts)
    if _suspicious(log, facts) or problems:
        missing = examine(log, problems)
    if any(missing.values()):
        frame = frame.filter(pl.all_horizontal(pl.col("user", "item", "time").is_not_null()))
        facts, counts = _count_rows(log, frame)
        if facts["rows"] == 0:
            raise SlipstreamError(
                f"no row of {log.label} has all of {', '.join(log.columns.roles().values())}: "
                "there is nothing to prepare"
            )
        problems = _id_problems(log, counts)
        if problems:
            examine(log, problems)
    ordered = {role: order_ids(each, log.guesses_ids(role)) for role, each in counts.items()}
    return _Counted(
        frame,
        ordered["user"][0],
        ordered["item"][0],
        {role: keys for role, (_, keys) in ordered.items()},
        rows,
        rows - facts["rows"],
        {name: count for name, count in missing.items() if count},
        _context_labels(log, frame),
    )


def _context_labels(log: RawLog, frame: pl.LazyFrame) -> dict[str, list[str]]:
    """Return the labels of every context column, ascending."""
    if not log.context:
        return {}
    found = pl.collect_all(
        [frame.select(pl.col(name).unique()) for name in log.context], engine="streaming"
    )
    labels = {}
    for name, texts in zip(log.columns.context, found, strict=True):
        numeric = log.untyped or log.schema[name].is_integer()
        labels[f"{CONTEXT}{name}"] = order_labels(name, texts.to_series(), numeric)
    return labels


def _count_rows(log: RawLog, frame: pl.LazyFrame) -> tuple[dict[str, int], dict[str, pl.DataFrame]]:
    """Return rows, nulls and the range of times, and the counts of users and items, unordered."""
    facts = frame.select(
        pl.len().alias("rows"),
        pl.sum_horizontal(pl.all().null_count()).alias("nulls"),
        pl.col("time").min().alias("min_time"),
        pl.col("time").max().alias("max_time"),
    )
    counts = [frame.group_by(pl.col(role).alias("id")).len("count") for role in ("user", "item")]
    found, users, items = pl.collect_all([facts, *counts], engine="streaming")
    return found.row(0, named=True), {"user": users, "item": items}


def _suspicious(log: RawLog, facts: dict[str, int]) -> bool:
    """Whether some value must be looked at: one that is null, or a time out of range."""
    if facts["nulls"] or facts["min_time"] is None:
        return True
    return (
        facts["min_time"] < log.time.least
        or facts["min_time"] < 0
        or facts["max_time"] > LAST_SECOND * log.per_second
    )


def _id_problems(log: RawLog, counts: dict[str, pl.DataFrame]) -> list[LogProblem]:
    return [
        LogProblem(role, column, reason, bad, IDS_ADVICE)
        for role, column in (("user", log.columns.user), ("item", log.columns.item))
        for reason, bad in unusable_ids(
            counts[role]["id"].drop_nulls(), log.guesses_ids(role), pl.col(column).cast(pl.String)
        )
    ]


def _offsets(counts: np.ndarray) -> np.ndarray:
    offsets = np.zeros(counts.size + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


class ScratchColumns:
    """Scratch columns; large ones are mapped files, so they need not fit in memory."""

    def __init__(
        self, directory: Path, rows: int, actions: list[str], context: Sequence[str] = ()
    ) -> None:
        self.directory = directory / "scratch"
        self.directory.mkdir()
        self.in_memory = rows * (16 + 4 * (len(actions) + len(context))) <= IN_MEMORY
        self.item_N = self._map("item", np.int64, rows)
        self.time_N = self._map("time", np.int64, rows)
        self.actions = {
            name: self._map(f"action{index}", np.float32, rows)
            for index, name in enumerate(actions)
        }
        self.context = {
            name: self._map(f"context{index}", np.int32, rows) for index, name in enumerate(context)
        }

    def _map(self, name: str, dtype: type, rows: int) -> np.ndarray:
        if self.in_memory:
            return np.empty(rows, dtype=dtype)
        path = self.directory / name
        size = max(1, rows * np.dtype(dtype).itemsize)
        with open(path, "wb") as file:
            # Allocate the space now: on a full disk, writing to a hole of a mapped file would end
            # the process with a signal, without an exception.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
        return np.memmap(path, dtype=dtype, mode="r+", shape=(rows,))

    def all(self) -> Iterator[tuple[str, np.ndarray]]:
        yield "item", self.item_N
        yield "time", self.time_N
        yield from self.actions.items()
        yield from self.context.items()

    def remove(self) -> None:
        for path in self.directory.iterdir():
            path.unlink()
        self.directory.rmdir()


def _scatter(
    counted: _Counted, offsets_U1: np.ndarray, arrays: ScratchColumns, report: Progress
) -> None:
    """Second pass: write each behaviour, ids replaced by rows, to its user's next free place."""
    codes = [code_expression(name, labels) for name, labels in counted.context.items()]
    encoded, lookups = counted.frame.with_columns(codes), {}
    for role, keys in counted.keys.items():
        if keys.schema["key"] == pl.Int64:
            lookups[role] = RowLookup(keys["key"].to_numpy())
        else:
            rows = keys.lazy().select(pl.col("key").alias(role), pl.col("row").alias(f"{role} row"))
            encoded = (
                encoded.join(rows, on=role, how="left", maintain_order="left")
                .drop(role)
                .rename({f"{role} row": role})
            )
    free_U = offsets_U1[:-1].copy()
    total, done = int(offsets_U1[-1]), 0
    for batch in encoded.collect_batches(
        chunk_size=BATCH_ROWS, maintain_order=True, engine="streaming"
    ):
        columns = {name: batch[name].to_numpy() for name in batch.columns}
        columns |= {role: lookup.rows(columns[role]) for role, lookup in lookups.items()}
        place_T, order_T = _places(columns["user"], free_U)
        for name, array in arrays.all():
            array[place_T] = columns[name][order_T]
        done += len(batch)
        report("ordering by user", done, total)
    if done != total:
        raise SlipstreamError(
            f"the log changed while it was read: {total:,} rows at first, then {done:,}; prepare "
            "it again when nothing writes to it"
        )


def _places(user_T: np.ndarray, free_U: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the order that groups a batch by user, and each behaviour's place in that order.

    The users' next free places in `free_U` are advanced.
    """
    order_T = _stable_argsort(user_T, free_U.size)
    user_T = user_T[order_T].astype(np.int64)
    starts = np.flatnonzero(np.diff(user_T, prepend=-1))
    counts = np.diff(starts, append=user_T.size)
    place_T = np.arange(user_T.size) + np.repeat(free_U[user_T[starts]] - starts, counts)
    free_U[user_T[starts]] += counts
    return place_T, order_T


def _stable_argsort(values_T: np.ndarray, below: int) -> np.ndarray:
    """Sort whole numbers in [0, below), below <= 2^32, stably: a radix sort of 16 bits a pass."""
    low_T = np.argsort((values_T & 0xFFFF).astype(np.uint16), kind="stable")
    if below <= 1 << 16:
        return low_T
    return low_T[np.argsort((values_T >> 16).astype(np.uint16)[low_T], kind="stable")]


def _apply_filters(
    item_N: np.ndarray, offsets_U1: np.ndarray, num_items: int, filters: Filters
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return which users and items stay, and how many behaviours."""
    keep_U, keep_V = np.ones(offsets_U1.size - 1, dtype=bool), np.ones(num_items, dtype=bool)

    def count() -> tuple[np.ndarray, np.ndarray]:
        user_counts = np.zeros(keep_U.size, dtype=np.int64)
        item_counts = np.zeros(num_items, dtype=np.int64)
        for first, last in user_blocks(offsets_U1):
            users_T = np.repeat(np.arange(first, last), np.diff(offsets_U1[first : last + 1]))
            items_T = np.asarray(item_N[offsets_U1[first] : offsets_U1[last]])
            live_T = keep_U[users_T] & keep_V[items_T]
            user_counts[first:last] = np.bincount(users_T[live_T] - first, minlength=last - first)
            item_counts += np.bincount(items_T[live_T], minlength=num_items)
        return user_counts, item_counts

    user_counts, item_counts = count()
    if filters.min_item_count > 1:
        keep_V &= item_counts >= filters.min_item_count
        user_counts, item_counts = count()
    keep_U &= user_counts >= max(1, filters.min_user_count)
    user_counts, item_counts = count()
    while True:
        drop_U = keep_U & (user_counts < max(1, filters.k_core))
        drop_V = keep_V & (item_counts < max(1, filters.k_core))
        if not drop_U.any() and not drop_V.any():
            break
        keep_U &= ~drop_U
        keep_V &= ~drop_V
        user_counts, item_counts = count()
    kept = int(user_counts.sum())
    if kept == 0:
        given = ", ".join(f"{name} {count}" for name, count in asdict(filters).items() if count > 1)
        raise SlipstreamError(f"the filters ({given}) leave no behaviour; lower them")
    return keep_U, keep_V, kept


def user_blocks(offsets_U1: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield ranges of users (first, last) with about BLOCK_ROWS behaviours each."""
    first, num_users = 0, offsets_U1.size - 1
    while first < num_users:
        last = int(np.searchsorted(offsets_U1, offsets_U1[first] + BLOCK_ROWS, side="right")) - 1
        last = min(num_users, max(first + 1, last))
        yield first, last
        first = last


def _sort_and_compact(
    arrays: ScratchColumns,
    offsets_U1: np.ndarray,
    keep_U: np.ndarray,
    keep_V: np.ndarray,
    drop_duplicates: bool,
    report: Progress,
) -> np.ndarray:
    """Third pass, in place: filter each block, sort it by (user, time) and write it compactly.

    A block is written where the last one ended, which is never beyond its own beginning. Times stay
    as fine as the log has them.
    """
    new_rows_V = np.cumsum(keep_V) - 1
    counts_U = np.zeros(keep_U.size, dtype=np.int64)
    written, total = 0, int(offsets_U1[-1])
    for first, last in user_blocks(offsets_U1):
        begin, end = int(offsets_U1[first]), int(offsets_U1[last])
        users_T = np.repeat(np.arange(last - first), np.diff(offsets_U1[first : last + 1]))
        item_T = np.asarray(arrays.item_N[begin:end])
        live_T = keep_U[first + users_T] & keep_V[item_T]
        chosen_T = np.flatnonzero(live_T)
        chosen_T = chosen_T[
            _stable_order(users_T[chosen_T], np.asarray(arrays.time_N[begin:end])[chosen_T])
        ]
        stop = written + chosen_T.size
        for name, array in arrays.all():
            values_T = np.asarray(array[begin:end])[chosen_T]
            if name == "item":
                values_T = new_rows_V[values_T]
            array[written:stop] = values_T
        users_T = users_T[chosen_T]
        if drop_duplicates:
            first_T = ~_repeats(
                users_T, [np.asarray(each[written:stop]) for _, each in arrays.all()]
            )
            if not first_T.all():
                users_T = users_T[first_T]
                for _, array in arrays.all():
                    array[written : written + users_T.size] = array[written:stop][first_T]
                stop = written + users_T.size
        counts_U[first:last] = np.bincount(users_T, minlength=last - first)
        written = stop
        report("ordering by time", end, total)
    return _offsets(counts_U[keep_U])


def _stable_order(users_T: np.ndarray, times_T: np.ndarray) -> np.ndarray:
    """Return the stable order by (user, time); `users_T` ascends already, times are >= 0."""
    later_T = (np.diff(times_T) >= 0) | (np.diff(users_T) > 0)
    if later_T.all():
        return np.arange(users_T.size)
    low = int(times_T.min())
    span = int(times_T.max()) - low + 1
    if (int(users_T[-1]) + 1) * span < 1 << 62:
        return np.argsort(users_T * span + (times_T - low), kind="stable")
    return np.lexsort((times_T, users_T))


def _repeats(user_T: np.ndarray, columns: list[np.ndarray]) -> np.ndarray:
    """Mark the behaviours that equal an earlier one in all of user, item, time and the others.

    The columns are item, time, actions, context, by user, then time, then place in the file. Only
    behaviours at the same time as another one are compared.
    """
    item_T, time_T, *others = columns
    repeats_T = np.zeros(user_T.size, dtype=bool)
    same_T = (time_T[1:] == time_T[:-1]) & (user_T[1:] == user_T[:-1])
    if not same_T.any():
        return repeats_T
    tied_T = np.zeros(user_T.size, dtype=bool)
    tied_T[1:] |= same_T
    tied_T[:-1] |= same_T
    tied = np.flatnonzero(tied_T)
    moment = np.cumsum(np.concatenate([[True], ~same_T]))[tied]  # one number per user and time
    parts = [moment, *(column[tied] for column in (item_T, *others))]
    order = np.lexsort(parts[::-1])  # stable: equal ones stay in their order
    equal = np.ones(tied.size - 1, dtype=bool)
    for part in parts:
        equal &= part[order[1:]] == part[order[:-1]]
    repeats_T[tied[order[1:][equal]]] = True
    return repeats_T
