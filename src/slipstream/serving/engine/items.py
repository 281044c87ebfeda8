"""The catalogue: original item ids, the rows of the item table that stand for them, their titles.

Touch this when more is known of an item. Ids are int64 or text, as the catalogue was prepared; a
catalogue of numbers also takes their decimal text, one of text also takes whole numbers. An id the
bundle does not know is never replaced by another item.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from slipstream.errors import SlipstreamError
from slipstream.history.user_history import History
from slipstream.serving.engine.item_columns import ItemColumn
from slipstream.serving.engine.title_search import TitleSearch
from slipstream.serving.id_arrays import as_numbers, as_text, id_array
from slipstream.serving.id_arrays import whole_numbers as whole_numbers
from slipstream.serving.request_errors import BadRequest

_FEATURE = "feature:"
_MOST_SEEN = 512  # stored histories remembered as known


class ItemIds:
    """The catalogue's original ids and the rows that stand for them.

    Ids ascend, but for those of a store that has grown: then lookups go by their sorted order.
    """

    def __init__(self, path: Path) -> None:
        try:
            # Never closed: ids, titles and features stay in the file and are read from there.
            batch = pa.ipc.open_file(pa.memory_map(str(path), "r")).get_batch(0)
            column = batch.column("id")
        except (OSError, pa.ArrowInvalid, KeyError) as error:
            raise SlipstreamError(
                f"the item vocabulary {path} cannot be read ({error}); export the bundle again"
            ) from error
        self._seen: dict[tuple[object, int, int], None] = {}
        self.numeric = pa.types.is_integer(column.type)
        self.ids_N = column.to_numpy(zero_copy_only=self.numeric)
        self._order_N = None  # the rows by ascending id, where that is another order
        if self.numeric and (self.ids_N[1:] < self.ids_N[:-1]).any():
            self._order_N = np.argsort(self.ids_N, kind="stable")
        self._sorted_N = self.ids_N if self._order_N is None else self.ids_N[self._order_N]
        self._row_of_text = (
            None if self.numeric else {name: row for row, name in enumerate(self.ids_N.tolist())}
        )
        self._columns = {name: batch.column(name) for name in batch.schema.names if name != "id"}
        self._read: dict[str, ItemColumn] = {}  # features that were asked for
        self._search = TitleSearch(self.ids_N, self._columns.get("title"))

    def __len__(self) -> int:
        return int(self.ids_N.size)

    def find(self, items: Any) -> np.ndarray:
        """Return the row of every item, -1 for an item the catalogue lacks."""
        ids = id_array(items)
        if self._row_of_text is not None:
            get = self._row_of_text.get
            return np.array([get(text, -1) for text in as_text(ids)], dtype=np.int64)
        ids_T, number_T = (ids, None) if ids.dtype != object else as_numbers(ids)
        places_T = self._sorted_N[:-1].searchsorted(ids_T)  # what lies behind the last is the last
        known_T = self._sorted_N[places_T] == ids_T
        if number_T is not None:
            known_T &= number_T
        rows_T = places_T if self._order_N is None else self._order_N[places_T]
        return rows_T if known_T.all() else np.where(known_T, rows_T, -1)

    def rows(self, items: Any) -> torch.Tensor:
        """Return the row of every item; the error names an unknown one."""
        rows_T = self.find(items)
        if rows_T.size and int(rows_T.min()) < 0:
            unknown = list(items)[int(np.argmin(rows_T))]
            unknown = unknown.item() if isinstance(unknown, np.generic | torch.Tensor) else unknown
            raise BadRequest(
                f"item {unknown!r} is not in this bundle's catalogue; send only items it was "
                "trained on"
            )
        return torch.from_numpy(rows_T)

    def has_seen(self, history: History) -> bool:
        """Whether these very stored behaviours were looked up before, and all were known."""
        return (history.source, history.first, len(history)) in self._seen

    def note_seen(self, history: History) -> None:
        """Note that all items of a stored history are known; the latest ones are remembered."""
        if history.source is not None:
            self._seen[history.source, history.first, len(history)] = None
            if len(self._seen) > _MOST_SEEN:
                self._seen.pop(next(iter(self._seen)))

    def contains(self, items: Any) -> np.ndarray:
        """Return which of these ids the catalogue holds."""
        return self.find(items) >= 0

    def canonical(self, items: Any) -> np.ndarray:
        """Return ids, known or not, as this catalogue writes its own: int64 or text."""
        ids = id_array(items)
        if not self.numeric:
            return np.array(as_text(ids), dtype=object)
        ids_T, number_T = as_numbers(ids)
        if not number_T.all():
            raise BadRequest(
                f"item '{ids[~number_T][0]}' is no whole number, but all ids of this catalogue "
                "are; send numbers"
            )
        return ids_T

    def originals(self, rows: torch.Tensor | np.ndarray) -> list[int | str]:
        """Return the original ids of rows."""
        originals: list[int | str] = self.ids_N[np.asarray(rows)].tolist()
        return originals

    def titles(self, items: Any) -> list[str | None]:
        """Return the title of every item, None where it has none."""
        if not self.titled:
            return [None] * len(items)
        titles: list[str | None] = self._take("title", items).to_pylist()
        return titles

    @property
    def titled(self) -> bool:
        """Whether the catalogue has titles."""
        return "title" in self._columns

    def search(self, query: str, count: int) -> list[int | str]:
        """Return the ids of items whose title or id a person may mean, the best first."""
        return self.originals(self._search.find(query, count))

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the item features that can be shown."""
        names = (name for name in self._columns if name.startswith(_FEATURE))
        return tuple(name.removeprefix(_FEATURE) for name in names)

    def shown(self, names: Sequence[str], items: Any) -> dict[str, list[Any]]:
        """Return features of items: a label, a list of labels or a number, None where unknown."""
        self.check_features(names)
        return {name: _values(self._take(_FEATURE + name, items)) for name in names}

    def check_features(self, names: Iterable[str]) -> None:
        """Refuse names that are no item features; the error lists those that are."""
        for name in names:
            if name not in self.features:
                known = ", ".join(self.features) or "none"
                raise BadRequest(f"'{name:.80}' is no item feature of this bundle (known: {known})")

    def column(self, name: str) -> ItemColumn:
        """Return a feature of all items, read once."""
        if name not in self._read:
            self._read[name] = ItemColumn.of(self._columns[_FEATURE + name])
        return self._read[name]

    def _take(self, name: str, items: Any) -> pa.Array:
        """Return a column's values of items, null for an item the catalogue lacks."""
        rows_T = self.find(items)
        return self._columns[name].take(pa.array(rows_T, mask=rows_T < 0))


def _values(column: pa.Array) -> list[Any]:
    """Return a feature's values; the empty label stands for unknown, as in a store."""
    values = column.to_pylist()
    if pa.types.is_floating(column.type):
        return [None if value is None or value != value else value for value in values]
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        return [[label for label in labels or [] if label] for labels in values]
    return [value or None for value in values]
