"""`append_log`: adds later behaviours, new users and new items to a store.

Rows of existing users and items, and codes of existing categories, keep their numbers, because
trained tables are keyed by them; new ones come after them. Touch this when more of a store can
grow. The log is prepared as any log into a small store of its own, then the two are merged.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from slipstream.data.choices import Choices, FeatureFile, TableSource
from slipstream.data.context_columns import context_feature, grown_context
from slipstream.data.ingest import Filters, ScratchColumns, ingest, user_blocks
from slipstream.data.item_vectors import VectorSource, write_item_vectors
from slipstream.data.log_files import expand_paths
from slipstream.data.own_log import log_columns, open_own_log, open_table, paths_of
from slipstream.data.preparation import scratch_next_to
from slipstream.data.raw_log import Columns, Progress, RawLog
from slipstream.data.row_lookup import RowLookup
from slipstream.data.store import (
    ACTION,
    CONTEXT,
    GROWN_FORMAT,
    ITEMS,
    USERS,
    SequenceStore,
    Vocabulary,
    map_batch,
    write_store,
)
from slipstream.errors import SlipstreamError
from slipstream.files import atomic_directory, check_output

LATE = ("error", "drop")


@dataclass(frozen=True)
class AppendReport:
    """What an append did; `already`: this log was appended before, so nothing changed."""

    store: SequenceStore
    behaviours: int = 0
    users: int = 0
    items: int = 0
    late: int = 0
    duplicates: int = 0
    already: bool = False


def append_log(
    directory: str | os.PathLike[str],
    data: TableSource,
    *,
    out: str | os.PathLike[str] | None = None,
    late: str = "error",
    columns: Columns | None = None,
    items: TableSource | None = None,
    users: TableSource | None = None,
    item_vectors: Mapping[str, VectorSource] | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> AppendReport:
    """Append a log to the store in `directory`, or write the grown store to `out`.

    The log is read as the store's own was; `columns` is for another one's names. `items` and
    `users` are tables with the features of new ones, `item_vectors` the vectors of new items by
    name; a new item without one has zeros. Behaviours older than their user's last one
    are refused, or left out with `late="drop"`.
    """
    if late not in LATE:
        raise SlipstreamError(f"unknown choice '{late}' of late; it is {' or '.join(LATE)}")
    base, target = SequenceStore.open(Path(directory)), Path(out or directory)
    report = progress or (lambda what, done, total: None)
    choices = recorded_choices(base, columns, items, users)
    if target.resolve() != Path(directory).resolve():
        inputs = [*expand_paths(paths_of(data)), Path(directory)]
        check_output(target, "store", force=force, inputs=inputs)
    with scratch_next_to(target) as scratch:
        log = open_own_log(open_table(data, log_columns(choices)), choices)
        text = {r for r, v in (("user", base.users), ("item", base.items)) if not v.numeric}
        log = replace(log, text_ids=frozenset(text))
        (scratch / "new").mkdir()
        ingest(log, scratch / "new", Filters(), progress=report)
        new = SequenceStore.open(scratch / "new")
        if new.digest in base.appended or new.digest == [*base.ancestors, base.digest][0]:
            return AppendReport(base, already=True)
        merge = _Merge(base, new, log)
        merge.leave_out_late(late)
        if log.duplicates == "drop":
            merge.leave_out_duplicates()
        if not merge.keep_T.any():
            return AppendReport(base, late=merge.late, duplicates=merge.duplicates)
        with atomic_directory(target) as place:
            merge.write(place, report)
            if base.item_vectors or item_vectors:
                write_item_vectors(place, item_vectors or {}, choices.columns.item, base)
    grown = SequenceStore.open(target)
    return AppendReport(
        grown,
        grown.num_behaviours - base.num_behaviours,
        grown.num_users - base.num_users,
        grown.num_items - base.num_items,
        merge.late,
        merge.duplicates,
    )


def recorded_choices(
    store: SequenceStore,
    columns: Columns | None = None,
    items: TableSource | None = None,
    users: TableSource | None = None,
) -> Choices:
    """Return the choices by which a store was prepared, for another log of the same kind."""
    source = store.meta.get("source", {})
    named, kept = source.get("columns"), source.get("choices", {})
    if columns is None and named is not None:
        columns = Columns(**named)
    elif columns is None:
        time = "timestamp" if store.timed else None
        columns = Columns("user_id", "item_id", time, tuple(store.actions))

    def features(noun: str, given: TableSource | None, known: dict[str, Any]) -> FeatureFile | None:
        chosen = kept.get(noun, {})
        names = tuple(f"{name}:{feature.kind}" for name, feature in known.items())
        title = chosen.get("title")
        if (given is None and chosen.get("file", True)) or not (names or title):
            return None
        separator = chosen.get("separator")
        return FeatureFile(given, chosen.get("id"), names, title, separator)

    chosen_items = features("items", items, store.item_features)
    if chosen_items is not None or columns.title is not None:
        columns = replace(columns, title=None)  # the title is with the features
    return Choices(
        columns=columns,
        time_unit=kept.get("time_unit"),
        nulls=kept.get("nulls"),
        duplicates=kept.get("duplicates"),
        action_values=kept.get("action_values"),
        items=chosen_items,
        users=features("users", users, store.user_features),
    )


class _Merge:
    """A store and the one to add to it: which behaviours are kept, and where they go."""

    def __init__(self, base: SequenceStore, new: SequenceStore, log: RawLog) -> None:
        self.base, self.new, self.label = base, new, log.label
        self.source = {"source": log.label, "rows": new.meta["rows_read"]}
        self.late = self.duplicates = 0
        self.known_users = _known_rows(base.users, new.users, "user", log.label)
        self.known_items = _known_rows(base.items, new.items, "item", log.label)
        self.user_T = np.repeat(np.arange(new.num_users), new.lengths_U)
        self.keep_T = np.ones(new.num_behaviours, dtype=bool)
        last_U = np.full(base.num_users, -1)
        last_U[:] = base.timestamps_N[base.offsets_U1[1:] - 1]  # every user has a behaviour
        self.last_T = np.where(
            self.known_users[self.user_T] >= 0, last_U[self.known_users[self.user_T]], -1
        )
        self.actions = sorted({*base.actions, *new.actions})
        self.context = {
            name: grown_context(base.context.get(name), new.context.get(name))
            for name in sorted({*base.context, *new.context})
        }

    def leave_out_late(self, rule: str) -> None:
        late_T = self.new.timestamps_N < self.last_T
        self.late = int(late_T.sum())
        if self.late and rule == "error":
            place = int(np.flatnonzero(late_T)[0])
            user = self.new.users.id(int(self.user_T[place]))
            raise SlipstreamError(
                f"{self.label} has {self.late:,} behaviours that are older than their user's last "
                f"one in {self.base.directory} (user '{user}' at {self.new.timestamps_N[place]}, "
                f"last at {self.last_T[place]}), so nothing was written; leave them out with "
                "--late drop, or prepare the whole log again"
            )
        self.keep_T &= ~late_T

    def leave_out_duplicates(self) -> None:
        """Leave out what equals a behaviour of the user's last second in the store."""
        tied = np.flatnonzero(self.keep_T & (self.new.timestamps_N == self.last_T))
        if not tied.size:
            return
        users = np.unique(self.known_users[self.user_T[tied]])
        lengths = self.base.lengths_U[users]
        before = np.cumsum(lengths) - lengths
        places = np.arange(lengths.sum()) + np.repeat(self.base.offsets_U1[users] - before, lengths)
        frames = []
        for store, rows, user, item in (
            (self.base, places, np.repeat(users, lengths), self.base.items_N[places]),
            (
                self.new,
                tied,
                self.known_users[self.user_T[tied]],
                self.known_items[self.new.items_N[tied]],
            ),
        ):
            values = {name: _action(store, name)[rows] for name in self.actions}
            values |= {
                f"{CONTEXT}{name}": self._context_codes(store, name, rows) for name in self.context
            }
            parts = {"#user": user, "#item": item, "#time": store.timestamps_N[rows]}
            frames.append(pl.DataFrame(parts | values))
        found = (
            frames[1]
            .with_row_index("#row")
            .join(frames[0], on=frames[0].columns, how="semi", nulls_equal=True)
        )
        self.keep_T[tied[found["#row"].to_numpy()]] = False
        self.duplicates = len(found)

    def write(self, directory: Path, report: Progress) -> None:
        """Write the grown store."""
        kept = np.flatnonzero(self.keep_T)
        users = _Rows(self.known_users, self.user_T[kept], self.base.num_users)
        items = _Rows(self.known_items, self.new.items_N[kept], self.base.num_items)
        user_T = users.rows[self.user_T[kept]]
        lengths_U = np.zeros(users.count, dtype=np.int64)
        lengths_U[: self.base.num_users] = self.base.lengths_U
        old_U = lengths_U.copy()
        lengths_U += np.bincount(user_T, minlength=users.count)
        offsets_U1 = np.concatenate([[0], np.cumsum(lengths_U)])
        names = [f"{ACTION}{name}" for name in self.actions]
        arrays = ScratchColumns(directory, int(offsets_U1[-1]), names, list(self.context))
        self._copy_base(arrays, offsets_U1, report)
        # The new behaviours of a user lie together, in order.
        starts = np.flatnonzero(np.diff(user_T, prepend=-1))
        counts = np.diff(starts, append=user_T.size)
        first = (offsets_U1[:-1] + old_U)[user_T[starts]]
        place_T = np.arange(user_T.size) + np.repeat(first - starts, counts)
        arrays.item_N[place_T] = items.rows[self.new.items_N[kept]]
        arrays.time_N[place_T] = self.new.timestamps_N[kept]
        for name in self.actions:
            arrays.actions[f"{ACTION}{name}"][place_T] = _action(self.new, name)[kept]
        for name, codes_N in arrays.context.items():
            codes_N[place_T] = self._context_codes(self.new, name, kept)
        report("writing", 0, 1)
        write_store(
            directory,
            offsets_U1,
            arrays.item_N,
            arrays.time_N,
            {name: arrays.actions[f"{ACTION}{name}"] for name in self.actions},
            _grown_table(self.base, self.new, ITEMS, items.added),
            _grown_table(self.base, self.new, USERS, users.added),
            self._meta(lengths_U, users, items, kept.size),
            {
                name: context_feature(arrays.context[name], labels)
                for name, (labels, _) in self.context.items()
            },
        )
        arrays.remove()

    def _context_codes(
        self, store: SequenceStore, name: str, rows: np.ndarray | slice
    ) -> np.ndarray:
        """Return codes of the grown store; 0 everywhere where `store` lacks the column."""
        if name not in store.context:
            return np.zeros(store.num_behaviours, dtype=np.int32)[rows]
        codes = store.context[name].codes[rows]
        return codes if store is self.base else self.context[name][1][codes]

    def _copy_base(self, arrays: ScratchColumns, offsets_U1: np.ndarray, report: Progress) -> None:
        base = self.base
        for first, last in user_blocks(base.offsets_U1):
            begin, end = int(base.offsets_U1[first]), int(base.offsets_U1[last])
            moved_U = offsets_U1[first:last] - base.offsets_U1[first:last]
            place_T = np.arange(begin, end) + np.repeat(moved_U, base.lengths_U[first:last])
            arrays.item_N[place_T] = base.items_N[begin:end]
            arrays.time_N[place_T] = base.timestamps_N[begin:end]
            for name in self.actions:
                arrays.actions[f"{ACTION}{name}"][place_T] = _action(base, name)[begin:end]
            for name, codes_N in arrays.context.items():
                codes_N[place_T] = self._context_codes(base, name, slice(begin, end))
            report("copying the store", end, base.num_behaviours)

    def _meta(
        self, lengths_U: np.ndarray, users: "_Rows", items: "_Rows", behaviours: int
    ) -> dict[str, Any]:
        base = self.base
        ours = ("format", "users", "items", "behaviours", "digest", "item_vectors")
        meta = {name: value for name, value in base.meta.items() if name not in ours}
        step = {
            "before": base.digest,
            "appended": self.new.digest,
            **self.source,
            "behaviours": behaviours,
            "users": len(users.added),
            "items": len(items.added),
            "late": self.late,
            "duplicates": self.duplicates,
        }
        return meta | {
            "format": GROWN_FORMAT,
            "actions": self.actions,
            "unsplittable_users": int((lengths_U < 3).sum()),
            "rows_read": base.meta.get("rows_read", 0) + self.source["rows"],
            "user_parts": [*base.users.parts, *([len(users.added)] if len(users.added) else [])],
            "item_parts": [*base.items.parts, *([len(items.added)] if len(items.added) else [])],
            "lineage": [*base.meta.get("lineage", []), step],
        }


class _Rows:
    """The rows of the new store's ids in the grown one; those that occur are added at the end."""

    def __init__(self, known_W: np.ndarray, used_T: np.ndarray, before: int) -> None:
        occurs_W = np.bincount(used_T, minlength=known_W.size) > 0
        self.added = np.flatnonzero((known_W < 0) & occurs_W)  # ascending by id
        self.rows = known_W.copy()
        self.rows[self.added] = before + np.arange(self.added.size)
        self.count = before + self.added.size


def _known_rows(base: Vocabulary, new: Vocabulary, noun: str, label: str) -> np.ndarray:
    """Return the row that each id of `new` has in `base`, -1 where it has none."""
    if base.numeric != new.numeric:
        kinds = ("whole numbers", "text")
        raise SlipstreamError(
            f"the {noun} ids of the store are {kinds[not base.numeric]}, but those of {label} are "
            f"{kinds[not new.numeric]}; convert the column first"
        )
    if base.ids_V is not None and new.ids_V is not None:
        return RowLookup(base.ids_V).rows(new.ids_V)
    rows = pl.DataFrame({"id": pl.Series(pl.from_arrow(base.ids)), "row": np.arange(len(base))})
    wanted = pl.DataFrame({"id": pl.Series(pl.from_arrow(new.ids))})
    found = wanted.join(rows, on="id", how="left", maintain_order="left")["row"]
    return found.fill_null(-1).to_numpy().copy()


def _action(store: SequenceStore, name: str) -> np.ndarray:
    """Return an action's values; 0 everywhere where the store lacks it."""
    if name in store.actions:
        return store.actions[name]
    return np.broadcast_to(np.float32(0), store.num_behaviours)


def _grown_table(base: SequenceStore, new: SequenceStore, file: str, added: np.ndarray) -> pa.Table:
    """Return a vocabulary with the added rows of another one after its own."""
    one, two = map_batch(base.directory / file), map_batch(new.directory / file)
    rows = two.take(pa.array(added))
    columns = {}
    for name in one.schema.names:
        column = one.column(name)
        other = rows.column(name) if name in rows.schema.names else None
        columns[name] = _grown_column(column, other, added.size)
    return pa.table(columns)


def _grown_column(column: pa.Array, other: pa.Array | None, count: int) -> pa.Array:
    """Return two columns one after the other; without the other, nothing is known of its rows."""
    if pa.types.is_dictionary(column.type):
        more = [0] * count if other is None else other.indices.to_numpy()
        dictionary = None if other is None else other.dictionary
        return _with_codes(column, np.asarray(more, dtype=np.int64), dictionary)
    if pa.types.is_large_list(column.type):
        lengths = np.zeros(count, dtype=np.int64)
        codes, dictionary = np.empty(0, dtype=np.int64), None
        if other is not None:
            lengths = np.asarray(other.value_lengths().to_numpy(), dtype=np.int64)
            flat = other.flatten()
            codes, dictionary = flat.indices.to_numpy().astype(np.int64), flat.dictionary
        old_V1 = column.offsets.to_numpy()
        offsets = np.concatenate([old_V1, old_V1[-1] + np.cumsum(lengths)])
        values = _with_codes(column.values, codes, dictionary)
        return pa.LargeListArray.from_arrays(pa.array(offsets), values)
    if other is None:
        unknown = [float("nan")] * count if pa.types.is_floating(column.type) else [None] * count
        other = pa.array(unknown, type=column.type)
    return pa.concat_arrays([column, other.cast(column.type)])


def _with_codes(
    column: pa.DictionaryArray, codes: np.ndarray, dictionary: pa.Array | None
) -> pa.DictionaryArray:
    """Append codes of another dictionary; its new labels get the next codes."""
    labels = column.dictionary.to_pylist()
    code_of = {label: code for code, label in enumerate(labels)}
    others: Sequence[str] = [] if dictionary is None else dictionary.to_pylist()
    translate = np.zeros(max(len(others), 1), dtype=np.int64)
    for code in np.unique(codes[codes > 0]).tolist():
        translate[code] = code_of.setdefault(others[code], len(code_of))
    grown = np.concatenate([column.indices.to_numpy(), translate[codes]])
    return pa.DictionaryArray.from_arrays(
        pa.array(grown, pa.int64()), pa.array(list(code_of), type=pa.large_string())
    )
