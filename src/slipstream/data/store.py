"""The sequence store: every user's behaviours in Arrow IPC files, mapped and read without a copy.

Touch this when the layout of a store changes. A store is a directory of these files:

    sequences.arrow   one row per user: large_list columns `items`, `timestamps`, one
                      `action:<name>` per action and one `context:<name>` per context column (a
                      list of dictionary values, int32 codes)
    items.arrow       the item vocabulary: `id` (int64 or text, ascending in each part), `title`,
                      one `feature:<name>` column each: a dictionary (one category a row), a list of
                      dictionary values (several categories a row), or float32 (a number)
    users.arrow       the same for users
    vectors/*.npy     pretrained vectors of items, if there are any (see item_vectors.py)
    store.json        format, counts, order rule, filters, source, digest; of a store that has
                      grown also its parts and its lineage (what was appended to what)

Every file holds a single record batch, so a column is one contiguous buffer of the mapping whatever
its size.
"""

import hashlib
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute

from slipstream.display import card
from slipstream.errors import SlipstreamError
from slipstream.files import read_json, write_json

FORMAT = 2
GROWN_FORMAT = 3  # as 2, but the ids ascend within each part: the base, then each append
READABLE = (1, 2, 3)  # format 1 has one category a row, nothing else
SEQUENCES, ITEMS, USERS, META = "sequences.arrow", "items.arrow", "users.arrow", "store.json"
ACTION, CONTEXT, FEATURE = "action:", "context:", "feature:"
FEATURE_KINDS = ("category", "categories", "number")


@dataclass(frozen=True)
class Feature:
    """A column of a vocabulary: one category a row, several categories a row, or a number.

    A context column has one category a behaviour.

    Code 0 is "unknown". Labels ascend from code 1, those of each append after the earlier ones.
    Row r of "categories" has the codes `codes[offsets_V1[r]:offsets_V1[r + 1]]`. An unknown number
    is NaN.
    """

    kind: Literal["category", "categories", "number"]
    codes: np.ndarray  # int64; none for a number
    offsets_V1: np.ndarray | None  # int64, of "categories" only
    values: np.ndarray | None  # float32, of a "number" only
    cardinality: int  # number of codes, 0 included; 0 for a number
    labels: pa.Array  # text of every code; none for a number

    @classmethod
    def of_column(cls, column: pa.Array) -> "Feature":
        """Make the feature whose Arrow column this is; nothing is copied."""
        none = np.empty(0, dtype=np.int64)
        if pa.types.is_floating(column.type):
            values = column.to_numpy(zero_copy_only=True)
            return cls("number", none, None, values, 0, pa.array([], pa.large_string()))
        if pa.types.is_large_list(column.type):
            inner, offsets_V1 = column.values, column.offsets.to_numpy(zero_copy_only=True)
            codes = inner.indices.to_numpy(zero_copy_only=True) if len(inner) else none
            labels = inner.dictionary
            return cls("categories", codes, offsets_V1, None, len(labels), labels)
        codes = column.indices.to_numpy(zero_copy_only=True)
        return cls("category", codes, None, None, len(column.dictionary), column.dictionary)

    @property
    def known_V(self) -> np.ndarray:
        """Which rows have a value."""
        if self.values is not None:
            return ~np.isnan(self.values)
        return self.codes > 0 if self.offsets_V1 is None else np.diff(self.offsets_V1) > 0

    def at(self, row: int) -> int | list[int] | float | None:
        """Return a row's code, its codes, or its number (None where it is not known)."""
        if self.values is not None:
            return float(self.values[row]) if self.values[row] == self.values[row] else None
        if self.offsets_V1 is None:
            return int(self.codes[row])
        codes: list[int] = self.codes[self.offsets_V1[row] : self.offsets_V1[row + 1]].tolist()
        return codes


class Vocabulary:
    """Original ids (int64 or text) and their rows.

    Ids ascend within each of the `parts` (their numbers of rows): what was prepared, then what each
    append added. A lookup is a binary search in each part.
    """

    def __init__(
        self, ids: pa.Array, titles: pa.Array | None, noun: str, parts: Sequence[int] = ()
    ) -> None:
        self._ids, self._titles, self._noun = ids, titles, noun
        self.ids, self.parts = ids, tuple(parts) or (len(ids),)
        if sum(self.parts) != len(ids):
            raise pa.ArrowInvalid(f"{sum(self.parts)} {noun} ids expected, {len(ids)} found")
        self.numeric = pa.types.is_integer(ids.type)
        self.ids_V = ids.to_numpy(zero_copy_only=True) if self.numeric else None

    def __len__(self) -> int:
        return len(self._ids)

    def id(self, row: int) -> int | str:
        """Return the original id of a row."""
        if not 0 <= row < len(self):
            raise IndexError(f"{self._noun} row {row} is outside 0 … {len(self) - 1}")
        return self._ids[row].as_py()

    @property
    def titled(self) -> bool:
        """Whether the data has titles."""
        return self._titles is not None

    def title(self, row: int) -> str | None:
        """Return the title of a row, if the data has titles."""
        return self._titles[row].as_py() if self._titles is not None else None

    def find(self, original: int | str) -> int | None:
        """Return the row of an original id, or None; text may stand for a number."""
        key = _as_key(original, self.numeric)
        if key is None:
            return None
        for begin, end in self._borders():
            if self.ids_V is not None:
                row = begin + int(np.searchsorted(self.ids_V[begin:end], key))
            else:
                row = begin + bisect_left(
                    range(begin, end), key, key=lambda r: self._ids[r].as_py()
                )
            if row < end and self._ids[row].as_py() == key:
                return row
        return None

    def _borders(self) -> Iterator[tuple[int, int]]:
        """Yield the first and the last row + 1 of every part."""
        end = 0
        for rows in self.parts:
            end += rows
            yield end - rows, end

    def row(self, original: int | str) -> int:
        """Return the row of an original id; an unknown id is a SlipstreamError."""
        row = self.find(original)
        if row is None:
            ends = list(self._borders())
            low = min((self.id(begin) for begin, _ in ends), key=lambda each: (each,))
            high = max((self.id(end - 1) for _, end in ends), key=lambda each: (each,))
            raise SlipstreamError(
                f"{self._noun} '{original}' is not in this data; its {len(self):,} {self._noun} "
                f"ids run from {low} to {high}"
            )
        return row

    def rows(self, originals: Sequence[int | str]) -> np.ndarray:
        """Return the rows of several original ids (int64); an unknown one is a SlipstreamError."""
        plain = all(type(each) is int and -(1 << 63) <= each < 1 << 63 for each in originals)
        if self.ids_V is None or not plain:
            return np.array([self.row(each) for each in originals], dtype=np.int64)
        keys_T = np.array(originals, dtype=np.int64)
        rows_T = np.full(len(keys_T), -1)
        for begin, end in self._borders():
            if begin < end:
                places_T = np.searchsorted(self.ids_V[begin:end], keys_T)
                places_T = begin + np.minimum(places_T, end - begin - 1)
                rows_T = np.where(self.ids_V[places_T] == keys_T, places_T, rows_T)
        for unknown in np.flatnonzero(rows_T < 0)[:1]:
            self.row(originals[unknown])  # raises
        return rows_T


def _as_key(original: int | str, numeric: bool) -> int | str | None:
    if not numeric:
        return str(original)
    try:
        key = int(original)
    except ValueError:
        return None
    return key if -(1 << 63) <= key < 1 << 63 else None


class SequenceStore:
    """An opened store; its arrays are views of the mapped files, read when they are used."""

    def __init__(
        self,
        directory: Path,
        meta: dict[str, Any],
        sequences: pa.RecordBatch,
        items: pa.RecordBatch,
        users: pa.RecordBatch,
    ):
        self.directory, self.meta = directory, meta
        lists = {name: sequences.column(name) for name in sequences.schema.names if name != "user"}
        self.offsets_U1: np.ndarray = lists["items"].offsets.to_numpy(zero_copy_only=True)
        self.items_N: np.ndarray = lists["items"].values.to_numpy(zero_copy_only=True)
        self.timestamps_N: np.ndarray = lists["timestamps"].values.to_numpy(zero_copy_only=True)
        self.actions: dict[str, np.ndarray] = {
            name.removeprefix(ACTION): column.values.to_numpy(zero_copy_only=True)
            for name, column in lists.items()
            if name.startswith(ACTION)
        }
        self.context: dict[str, Feature] = {  # one category a behaviour, codes as int32
            name.removeprefix(CONTEXT): Feature.of_column(column.values)
            for name, column in lists.items()
            if name.startswith(CONTEXT)
        }
        self.items, self.item_features = _vocabulary(items, "item", meta.get("item_parts", ()))
        self.users, self.user_features = _vocabulary(users, "user", meta.get("user_parts", ()))
        self.item_vectors: dict[str, np.ndarray] = {
            name: _map_vectors(vectors_path(directory, name), self.num_items)
            for name in meta.get("item_vectors", {})
        }

    @classmethod
    def open(cls, directory: str | Path) -> "SequenceStore":
        """Map a store written by `slipstream data prepare`."""
        directory = Path(directory)
        if not (directory / META).is_file():
            raise SlipstreamError(
                f"{directory} holds no prepared data (no {META}); make it with `slipstream data "
                f"prepare … --out {directory}`"
            )
        meta = read_json(directory / META)
        if not isinstance(meta, dict) or meta.get("format") not in READABLE:
            *others, last = map(str, READABLE)
            raise SlipstreamError(
                f"{directory} is not a store of format {', '.join(others)} or {last}; prepare the "
                "data again, or use the version of Slipstream that wrote it"
            )
        batches = [map_batch(directory / name) for name in (SEQUENCES, ITEMS, USERS)]
        try:
            store = cls(directory, meta, *batches)
        except (KeyError, pa.ArrowInvalid, AttributeError) as error:
            raise SlipstreamError(
                f"{directory} does not have the columns of a store ({error}); prepare the data "
                "again"
            ) from error
        found = {
            "users": store.num_users,
            "items": store.num_items,
            "behaviours": store.num_behaviours,
        }
        if found != {name: meta.get(name) for name in found}:
            raise SlipstreamError(
                f"{directory} holds {found}, but its {META} says otherwise; prepare the data again"
            )
        return store

    @property
    def num_users(self) -> int:
        return self.offsets_U1.size - 1

    @property
    def num_items(self) -> int:
        return len(self.items)

    @property
    def num_behaviours(self) -> int:
        return self.items_N.size

    @property
    def lengths_U(self) -> np.ndarray:
        return np.diff(self.offsets_U1)

    @property
    def digest(self) -> str:
        return str(self.meta["digest"])

    @property
    def ancestors(self) -> list[str]:
        """Digests of the stores from which this one grew, oldest first."""
        return [step["before"] for step in self.meta.get("lineage", [])]

    @property
    def appended(self) -> list[str]:
        """Digests of the logs that were appended."""
        return [step["appended"] for step in self.meta.get("lineage", [])]

    @property
    def timed(self) -> bool:
        """Whether the log had times; without, every timestamp is 0."""
        return bool(self.meta.get("timed", True))

    def __repr__(self) -> str:
        parts = [
            f"{self.num_users:,} users",
            f"{self.num_items:,} items",
            f"{self.num_behaviours:,} behaviours",
        ]
        if not self.timed:
            parts.append("no times")
        for noun, names in (
            ("actions", self.actions),
            ("context", self.context),
            ("features", self.item_features),
            ("user features", self.user_features),
            ("item vectors", self.item_vectors),
        ):
            parts += [f"{noun} {', '.join(names)}"] if names else []
        return f"store {self.directory}: {', '.join(parts)}"

    def _repr_html_(self) -> str:
        counts = {
            "users": self.num_users,
            "items": self.num_items,
            "behaviours": self.num_behaviours,
            "times": "yes" if self.timed else "no",
        }
        names = {
            "actions": list(self.actions),
            "context": list(self.context),
            "item features": list(self.item_features),
            "user features": list(self.user_features),
            "item vectors": list(self.item_vectors),
        }
        listed = {noun: ", ".join(found) for noun, found in names.items() if found}
        return card(f"Store {self.directory}", counts | listed)


def map_batch(path: Path) -> pa.RecordBatch:
    """Map the one record batch of a file."""
    try:
        with pa.memory_map(str(path), "r") as source:
            return pa.ipc.open_file(source).get_batch(0)
    except FileNotFoundError as error:
        raise SlipstreamError(f"{path} is missing; prepare the data again") from error
    except (pa.ArrowInvalid, OSError) as error:
        raise SlipstreamError(f"{path} is damaged ({error}); prepare the data again") from error


def vectors_path(directory: Path, name: str) -> Path:
    """Return the file of some item vectors."""
    return directory / "vectors" / f"{name}.npy"


def _map_vectors(path: Path, items: int) -> np.ndarray:
    """Map the vectors of all items; what is written to the array stays in memory."""
    try:
        vectors_ND: np.ndarray = np.load(path, mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise SlipstreamError(f"{path} is damaged ({error}); prepare the data again") from error
    if vectors_ND.ndim != 2 or len(vectors_ND) != items:
        raise SlipstreamError(
            f"{path} has the shape {vectors_ND.shape} for {items} items; prepare the data again"
        )
    return vectors_ND


def _vocabulary(
    batch: pa.RecordBatch, noun: str, parts: Sequence[int]
) -> tuple[Vocabulary, dict[str, Feature]]:
    names = batch.schema.names
    features = {
        name.removeprefix(FEATURE): Feature.of_column(batch.column(name))
        for name in names
        if name.startswith(FEATURE)
    }
    return Vocabulary(
        batch.column("id"), batch.column("title") if "title" in names else None, noun, parts
    ), features


def write_store(
    directory: Path,
    offsets_U1: np.ndarray,
    items_N: np.ndarray,
    timestamps_N: np.ndarray,
    actions: dict[str, np.ndarray],
    items: pa.Table,
    users: pa.Table,
    meta: dict[str, Any],
    context: Mapping[str, Feature] | None = None,
) -> None:
    """Write the four files into `directory`, usually one of `atomic_directory`.

    Counts and digest are added to `meta` in store.json.
    """
    offsets = pa.array(offsets_U1, type=pa.int64())
    columns: dict[str, pa.Array] = {"user": pa.array(np.arange(offsets_U1.size - 1))}
    values = {"items": items_N, "timestamps": timestamps_N} | {
        f"{ACTION}{name}": actions[name] for name in sorted(actions)
    }
    for name, array in values.items():
        columns[name] = pa.LargeListArray.from_arrays(offsets, pa.array(array))
    for name, each in sorted((context or {}).items()):
        codes = pa.array(each.codes, type=pa.int32())
        encoded = pa.DictionaryArray.from_arrays(codes, each.labels)
        columns[f"{CONTEXT}{name}"] = pa.LargeListArray.from_arrays(offsets, encoded)
    _write_batch(directory / SEQUENCES, pa.record_batch(columns))
    for name, table in ((ITEMS, items), (USERS, users)):
        _write_batch(directory / name, table.combine_chunks().to_batches()[0])
    counts = {
        "users": int(offsets_U1.size - 1),
        "items": items.num_rows,
        "behaviours": int(items_N.size),
    }
    digest = content_digest(offsets_U1, values, items, users, context or {})
    write_json(directory / META, {"format": FORMAT} | counts | meta | {"digest": digest})


def _write_batch(path: Path, batch: pa.RecordBatch) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)


def content_digest(
    offsets_U1: np.ndarray,
    values: dict[str, np.ndarray],
    items: pa.Table,
    users: pa.Table,
    context: Mapping[str, Feature],
) -> str:
    """Compute a digest of the store's content, independent of library and platform."""
    digest = hashlib.blake2b(digest_size=16)

    def add(name: str, chunks: Iterator[bytes | memoryview]) -> None:
        digest.update(f"\0{name}\0".encode())
        for chunk in chunks:
            digest.update(chunk)

    add("offsets", _array_bytes(offsets_U1))
    for name in sorted(values):
        add(name, _array_bytes(values[name]))
    for name, each in sorted(context.items()):
        add(f"{CONTEXT}{name}", _array_bytes(each.codes))
        add(f"{CONTEXT}{name}.labels", _column_bytes(pa.chunked_array([each.labels])))
    for noun, table in (("items", items), ("users", users)):
        for name in table.schema.names:
            add(f"{noun}.{name}", _column_bytes(table.column(name)))
    return digest.hexdigest()


def _array_bytes(array: np.ndarray) -> Iterator[memoryview]:
    little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
    yield little.view(np.uint8).data


def _column_bytes(column: pa.ChunkedArray) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a vocabulary column.

    Numbers are taken as they are, text as lengths and characters, dictionaries as codes and labels,
    lists as offsets and values.
    """
    for chunk in column.chunks:
        if pa.types.is_dictionary(chunk.type):
            yield from _array_bytes(chunk.indices.to_numpy())
            yield from _column_bytes(pa.chunked_array([chunk.dictionary]))
        elif pa.types.is_large_list(chunk.type):
            yield from _array_bytes(chunk.offsets.to_numpy())
            yield from _column_bytes(pa.chunked_array([chunk.values]))
        elif pa.types.is_integer(chunk.type) or pa.types.is_floating(chunk.type):
            yield from _array_bytes(chunk.to_numpy())
        else:
            lengths = pa.compute.binary_length(chunk).cast(pa.int64()).fill_null(-1)
            yield from _array_bytes(lengths.to_numpy())
            yield "".join(text or "" for text in chunk.to_pylist()).encode()
