"""The catalogue: original item ids and the rows of the item table that stand for them.

Touch this when another type of id is served. Ids are int64 up to 2^63-1 (or text, where the
catalogue was prepared from text) and never pass through float. An id the bundle does not know is
the caller's error: it is refused, never replaced by another item.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from slipstream.errors import SlipstreamError
from slipstream.serving.request_errors import BadRequest


class ItemIds:
    """The catalogue's original ids and the rows that stand for them.

    Ids ascend, but for those of a store that has grown: then lookups go by their sorted order.
    """

    def __init__(self, path: Path) -> None:
        try:
            with pa.memory_map(str(path), "r") as source:
                column = pa.ipc.open_file(source).get_batch(0).column("id")
        except (OSError, pa.ArrowInvalid, KeyError) as error:
            raise SlipstreamError(
                f"the item vocabulary {path} cannot be read ({error}); export the bundle again"
            ) from error
        self.numeric = pa.types.is_integer(column.type)
        self.ids_N = column.to_numpy(zero_copy_only=False).copy()
        self._order_N = None  # the rows by ascending id, where that is another order
        if self.numeric and (self.ids_N[1:] < self.ids_N[:-1]).any():
            self._order_N = np.argsort(self.ids_N, kind="stable")
        self._sorted_N = self.ids_N if self._order_N is None else self.ids_N[self._order_N]
        self._text = (
            None if self.numeric else {name: row for row, name in enumerate(self.ids_N.tolist())}
        )

    def __len__(self) -> int:
        return int(self.ids_N.size)

    def rows(self, items: Any) -> torch.Tensor:
        """Return the row of every item; the error names an unknown one."""
        if self._text is not None:
            return torch.tensor(
                [self._text_row(item) for item in _plain_list(items)], dtype=torch.int64
            )
        ids_T = whole_numbers("item ids", items)
        rows_T = np.minimum(np.searchsorted(self._sorted_N, ids_T), self.ids_N.size - 1)
        known_T = self._sorted_N[rows_T] == ids_T
        if not known_T.all():
            raise BadRequest(
                f"item {int(ids_T[~known_T][0])} is not in this bundle's catalogue; send only "
                "items it was trained on"
            )
        if self._order_N is not None:
            rows_T = self._order_N[rows_T]
        return torch.from_numpy(rows_T.astype(np.int64, copy=False))

    def contains(self, items_T: np.ndarray) -> np.ndarray:
        """Return which of these ids the catalogue holds (whole numbers only)."""
        rows_T = np.minimum(np.searchsorted(self._sorted_N, items_T), self.ids_N.size - 1)
        return np.asarray(self._sorted_N[rows_T] == items_T)

    def originals(self, rows: torch.Tensor) -> list[int] | list[str]:
        """Return the original ids of rows."""
        originals: list[int] | list[str] = self.ids_N[rows.numpy()].tolist()
        return originals

    def _text_row(self, item: object) -> int:
        assert self._text is not None
        row = self._text.get(str(item))
        if row is None:
            raise BadRequest(
                f"item '{item}' is not in this bundle's catalogue; send only items it was trained "
                "on"
            )
        return row


def whole_numbers(noun: str, values: Any) -> np.ndarray:
    """Return values as int64 without passing through float; `noun` names them in the error."""
    if isinstance(values, torch.Tensor):
        values = values.numpy()
    try:
        array = np.asarray(values) if isinstance(values, np.ndarray) else _from_python(values)
    except (OverflowError, ValueError, TypeError) as error:
        raise BadRequest(f"{noun} must be whole numbers between -2^63 and 2^63-1") from error
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise BadRequest(f"{noun} must be a flat list of whole numbers")
    if array.dtype.kind == "u" and array.size and int(array.max()) > (1 << 63) - 1:
        raise BadRequest(f"{noun} must be whole numbers between -2^63 and 2^63-1")
    return np.ascontiguousarray(array, dtype=np.int64)


def _from_python(values: Sequence[int]) -> np.ndarray:
    values = list(values)
    if any(isinstance(value, bool) or not isinstance(value, int | np.integer) for value in values):
        raise TypeError("not whole numbers")
    return np.array(values, dtype=np.int64)


def _plain_list(items: Any) -> list[object]:
    return list(items.tolist() if isinstance(items, np.ndarray | torch.Tensor) else items)
