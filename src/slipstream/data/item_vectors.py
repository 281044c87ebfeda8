"""Pretrained vectors of items (text, image): read from a file or a frame, kept with a store.

    vectors/<name>.npy   one row per item of the store, float32 or float16, mapped when it is used

A Parquet file or a frame has a column of ids and one column of lists of equal length. A matrix in
`text.npy` has its ids, in the order of its rows, in `text.ids.npy`. An item without a vector has
zeros and is counted. Touch this when vectors come in another form.
"""

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from slipstream.data.feature_columns import id_text
from slipstream.data.log_files import explain_polars_errors, is_frame
from slipstream.data.own_log import open_table
from slipstream.data.store import META, SequenceStore, Vocabulary, vectors_path
from slipstream.errors import SlipstreamError
from slipstream.files import read_json, write_json

# A path, a frame, or ids and a matrix with a row for each of them.
VectorSource = str | os.PathLike[str] | tuple[Any, np.ndarray] | Any
CHUNK_ROWS = 1 << 16


def write_item_vectors(
    directory: Path,
    sources: Mapping[str, VectorSource],
    ids: str | None = None,
    base: SequenceStore | None = None,
) -> None:
    """Add vectors to the store in `directory`, which has none yet; `ids` is their id column.

    With a `base` from which the store grew, the rows of its items are copied, and the sources are
    about the new items only.
    """
    store = SequenceStore.open(directory)
    known = {} if base is None else base.item_vectors
    facts, digest = {}, hashlib.blake2b(store.digest.encode(), digest_size=16)
    for name in {**known, **sources}:
        if base is not None and name not in known:
            raise SlipstreamError(
                f"the store has no item vectors '{name}', so new items cannot have them; prepare "
                "the data again with them"
            )
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
            raise SlipstreamError(
                f"item vectors are named by letters, digits, - and _, not '{name}'"
            )
        vectors_ND, facts[name] = _rows_of_items(store.items, name, sources.get(name), ids, known)
        path = vectors_path(directory, name)
        path.parent.mkdir(exist_ok=True)
        np.save(path, vectors_ND)
        digest.update(f"\0{name} {vectors_ND.dtype.name} {vectors_ND.shape}\0".encode())
        for start in range(0, len(vectors_ND), CHUNK_ROWS):
            digest.update(np.ascontiguousarray(vectors_ND[start : start + CHUNK_ROWS]).data)
    meta = read_json(directory / META)
    write_json(directory / META, meta | {"item_vectors": facts, "digest": digest.hexdigest()})


def _rows_of_items(
    items: Vocabulary,
    name: str,
    source: VectorSource | None,
    ids: str | None,
    known: Mapping[str, np.ndarray],
) -> tuple[np.ndarray, dict[str, Any]]:
    """Return a row for every item, zeros where there is none, and what was found."""
    old_ND = known.get(name)
    first = 0 if old_ND is None else len(old_ND)
    if source is None:
        assert old_ND is not None
        ids_V, values_VD = pl.Series([], dtype=pl.String), np.zeros((0, old_ND.shape[1]))
    else:
        ids_V, values_VD = _read(source, name, ids, items.numeric)
    dtype = values_VD.dtype if values_VD.dtype == np.float16 else np.dtype(np.float32)
    if old_ND is not None:
        dtype = old_ND.dtype
        if values_VD.shape[1] != old_ND.shape[1]:
            raise SlipstreamError(
                f"item vectors '{name}' of the store are {old_ND.shape[1]} wide, but the new ones "
                f"{values_VD.shape[1]}; give vectors of the same model"
            )
    rows_V = _item_rows(items, ids_V)
    fresh_V = rows_V >= first
    found_ND = np.zeros((len(items), values_VD.shape[1]), dtype=dtype)
    if old_ND is not None:
        found_ND[:first] = old_ND
    found_ND[rows_V[fresh_V]] = values_VD[fresh_V]
    has_vector = np.zeros(len(items), dtype=bool)
    has_vector[rows_V[fresh_V]] = True
    has_vector[:first] = found_ND[:first].any(axis=1)
    return found_ND, {
        "width": int(values_VD.shape[1]),
        "dtype": dtype.name,
        "missing": int((~has_vector).sum()),
        "missing_new": int((~has_vector[first:]).sum()),
        "not_in_the_log": int((rows_V < 0).sum()),
    }


def _item_rows(items: Vocabulary, ids_V: pl.Series) -> np.ndarray:
    """Return the item of every id, -1 where there is none; an id given twice is refused."""
    rows = pl.DataFrame(
        {"id": pl.Series(pl.from_arrow(items.ids)).cast(pl.String), "row": np.arange(len(items))}
    )
    wanted = ids_V.alias("id").to_frame()
    found = wanted.join(rows, on="id", how="left", maintain_order="left")["row"]
    rows_V = found.fill_null(-1).to_numpy().copy()
    repeated_V = ~ids_V.is_first_distinct().to_numpy()
    if repeated_V.any():
        raise SlipstreamError(
            f"{int(repeated_V.sum()):,} items have more than one vector (such as "
            f"'{ids_V.filter(pl.Series(repeated_V))[0]}'); keep one of them"
        )
    return rows_V


def _read(
    source: VectorSource, name: str, ids: str | None, numeric: bool
) -> tuple[pl.Series, np.ndarray]:
    """Return ids as text, spelled as the vocabulary's, and the vector of each."""
    if isinstance(source, str | os.PathLike) and str(source).endswith(".npy"):
        path = Path(source)
        ids_path = path.with_name(f"{path.name.removesuffix('.npy')}.ids.npy")
        source = (_load(ids_path, name), _load(path, name))
    if isinstance(source, tuple):
        if len(source) != 2:
            raise SlipstreamError(f"item vectors '{name}' are ids and a matrix, or a table")
        ids_frame = pl.DataFrame({"id": pl.Series(np.asarray(source[0]))})
        values = np.asarray(source[1])
    else:
        ids_frame, values = _read_table(source, name, ids)
    if values.ndim != 2 or values.dtype.kind != "f" or len(values) != len(ids_frame):
        raise SlipstreamError(
            f"item vectors '{name}' must be a matrix of floats with a row per id; got "
            f"{values.dtype} of shape {values.shape} for {len(ids_frame)} ids"
        )
    for start in range(0, len(values), CHUNK_ROWS):
        if not np.isfinite(values[start : start + CHUNK_ROWS]).all():
            raise SlipstreamError(
                f"item vectors '{name}' hold values that are not finite; mend or leave out those "
                "items"
            )
    texts = ids_frame.select(id_text(ids_frame.schema["id"], numeric))["id"]
    return texts, values


def _load(path: Path, name: str) -> np.ndarray:
    try:
        loaded: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise SlipstreamError(
            f"item vectors '{name}': {path} could not be read ({error}); a matrix in x.npy has its "
            "ids in x.ids.npy"
        ) from error
    return loaded


def _read_table(source: Any, name: str, ids: str | None) -> tuple[pl.DataFrame, np.ndarray]:
    table = open_table(source if is_frame(source) else os.fspath(source))
    with explain_polars_errors(table.label):
        schema = table.frame.collect_schema()
        lists = [n for n, kind in schema.items() if isinstance(kind, pl.List | pl.Array)]
        others = [n for n in schema if n not in lists]
        key = next((n for n in (ids, "id") if n in others), others[0] if len(others) == 1 else None)
        if len(lists) != 1 or key is None:
            raise SlipstreamError(
                f"item vectors '{name}' of {table.label} need a column of ids "
                f"('{ids or 'id'}') and one column of lists; it has {', '.join(schema)}"
            )
        frame = table.frame.select(pl.col(key).alias("id"), pl.col(lists[0]).alias("vector"))
        found = frame.drop_nulls().collect()
    vectors = found["vector"]
    if isinstance(vectors.dtype, pl.List):
        widths = vectors.list.len().unique()
        if len(widths) != 1 or widths[0] == 0:
            raise SlipstreamError(
                f"item vectors '{name}' of {table.label} must all have the same length; theirs "
                f"are {', '.join(map(str, widths.sort().head(4).to_list())) or 'none'}"
            )
        return found, vectors.explode().to_numpy().reshape(len(found), int(widths[0]))
    return found, vectors.to_numpy()


def vector_words(name: str, facts: Mapping[str, Any], items: int) -> str:
    """Say what a store has of some vectors."""
    words = f"item vectors {name}: {facts['width']} wide, {facts['dtype']}"
    if facts["missing"]:
        words += f"; {facts['missing']:,} of {items:,} items have none (zeros)"
    if facts["not_in_the_log"]:
        words += f"; left out {facts['not_in_the_log']:,} of items that are not in the log"
    return words
