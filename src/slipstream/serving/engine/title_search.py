"""Search of titles and ids: what a person types becomes items.

Case and accents do not count. A title that begins with the words comes before one that has them at
the start of a word, and that before one that has them anywhere; among equals the shorter title
comes first. Touch this when items are searched in another way.
"""

import threading
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

NOT_FOUND = 9
MARKS = "[\u0300-\u036f]"  # what accents become when a letter is taken apart


def fold_text(column: Any) -> pa.Array:
    """Return texts without case and accents; null stays null."""
    apart = pc.utf8_normalize(pc.cast(column, pa.string()), form="NFKD")
    return pc.utf8_lower(pc.replace_substring_regex(apart, pattern=MARKS, replacement=""))


class TitleSearch:
    """The titles and ids of a catalogue, folded when the first search asks for them.

    A number finds the item with that id; text finds titles, and ids that are text.
    """

    def __init__(self, ids_N: np.ndarray, titles: Any | None) -> None:
        self._ids_N, self._titles = ids_N, titles
        self._folded: list[pa.Array] | None = None
        self._lock = threading.Lock()

    def find(self, query: str, count: int) -> np.ndarray:
        """Return the rows of at most `count` items, the best first."""
        words = fold_text(pa.array([query.strip()]))[0].as_py()
        if not words:
            return np.empty(0, dtype=np.int64)
        kinds_N = np.full(len(self._ids_N), NOT_FOUND, dtype=np.int8)
        lengths_N = np.zeros(len(self._ids_N), dtype=np.int32)
        if self._ids_N.dtype != object and words.isdecimal() and len(words) < 19:
            kinds_N[self._ids_N == int(words)] = 0
        for column in self._columns():
            kinds_of_column_N = _kinds(column, words)
            better_N = kinds_of_column_N < kinds_N
            kinds_N[better_N] = kinds_of_column_N[better_N]
            texts_N = pc.fill_null(pc.utf8_length(column), 0).to_numpy(zero_copy_only=False)
            lengths_N[better_N] = texts_N[better_N]
        rows = np.flatnonzero(kinds_N < NOT_FOUND)
        order = np.lexsort((rows, lengths_N[rows], kinds_N[rows]))[:count]
        return rows[order]

    def _columns(self) -> list[pa.Array]:
        with self._lock:
            if self._folded is None:
                given = [] if self._titles is None else [self._titles]
                given += [pa.array(self._ids_N)] if self._ids_N.dtype == object else []
                self._folded = [fold_text(column) for column in given]
            return self._folded


def _kinds(column: pa.Array, words: str) -> np.ndarray:
    """Return 0 for the whole text, 1 for its start, 2 for the start of a word, 3 elsewhere."""
    places_N = pc.fill_null(pc.find_substring(column, words), -1).to_numpy()
    kinds_N = np.where(places_N < 0, NOT_FOUND, 3).astype(np.int8)
    starts_N = pc.fill_null(pc.find_substring(column, f" {words}"), -1).to_numpy()
    kinds_N[starts_N >= 0] = 2
    kinds_N[places_N == 0] = 1
    kinds_N[pc.fill_null(pc.equal(column, words), False).to_numpy(zero_copy_only=False)] = 0
    return kinds_N
