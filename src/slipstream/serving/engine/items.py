"""From what a caller knows (original ids, times, actions) to what the model reads (rows, labels,
codes), and a digest of it.

Ids are int64 up to 2^63-1 (or text, where the catalogue was prepared from text) and never pass
through float. An id the bundle does not know is the caller's error: guessing another item would
answer a question nobody asked.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from slipstream.errors import SlipstreamError
from slipstream.serving.request_errors import BadRequest

_MAX_TIME = 1 << 62  # attention refuses times beyond this


@dataclass(frozen=True)
class Behaviours:
    """What a user did, oldest first, in the caller's own terms.

    `items` are original ids and `timestamps` whole numbers; `actions` holds one column per action
    the bundle's tasks read (ranking bundles), `user` the codes of the user features the bundle was
    trained with (absent ones count as not known).
    """

    items: Any
    timestamps: Any
    actions: Mapping[str, Any] | None = None
    user: Mapping[str, int] | None = None

    def __len__(self) -> int:
        return len(self.items)


@dataclass(frozen=True)
class Encoded:
    """Behaviours as the model reads them."""

    rows_T: torch.Tensor  # int64 rows of the item table
    timestamps_T: torch.Tensor  # int64
    labels_TA: torch.Tensor  # float32, a column per ranking task; no columns for retrieval
    user: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.rows_T.numel()

    def part(self, begin: int, end: int | None = None) -> "Encoded":
        """Behaviours `begin` to `end`."""
        cut = slice(begin, end)
        return Encoded(self.rows_T[cut], self.timestamps_T[cut], self.labels_TA[cut], self.user)

    def then(self, later: "Encoded") -> "Encoded":
        """These behaviours followed by others of the same user."""
        if not len(later):
            return self
        return Encoded(
            torch.cat([self.rows_T, later.rows_T]),
            torch.cat([self.timestamps_T, later.timestamps_T]),
            torch.cat([self.labels_TA, later.labels_TA]),
            self.user if len(self) else later.user,
        )

    def digest(self, count: int | None = None) -> bytes:
        """16 bytes that stand for the first `count` behaviours and the user's features; equal
        digests mean equal prefixes.
        """
        whole = self if count is None else self.part(0, count)
        codes = np.array(
            [len(self.user), *(code for _, code in sorted(self.user.items()))], dtype=np.int64
        )
        digest = hashlib.blake2b(codes.tobytes(), digest_size=16)
        for column in (whole.rows_T, whole.timestamps_T, whole.labels_TA):
            digest.update(
                np.ascontiguousarray(column.numpy()).view(np.uint8).data if column.numel() else b"-"
            )
        return digest.digest()


class ItemIds:
    """The catalogue's original ids, ascending, and the rows that stand for them."""

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
        self._text = (
            None if self.numeric else {name: row for row, name in enumerate(self.ids_N.tolist())}
        )

    def __len__(self) -> int:
        return self.ids_N.size

    def rows(self, items: Any) -> torch.Tensor:
        """The row of every item; an unknown one is named in the error."""
        if self._text is not None:
            return torch.tensor(
                [self._text_row(item) for item in _plain_list(items)], dtype=torch.int64
            )
        ids_T = whole_numbers("item ids", items)
        rows_T = np.searchsorted(self.ids_N, ids_T)
        known_T = self.ids_N[np.minimum(rows_T, self.ids_N.size - 1)] == ids_T
        if not known_T.all():
            raise BadRequest(
                f"item {int(ids_T[~known_T][0])} is not in this bundle's catalogue; send only "
                "items it was trained on"
            )
        return torch.from_numpy(rows_T.astype(np.int64, copy=False))

    def originals(self, rows: torch.Tensor) -> list[int] | list[str]:
        """The original ids of rows."""
        return self.ids_N[rows.numpy()].tolist()

    def _text_row(self, item: object) -> int:
        assert self._text is not None
        row = self._text.get(str(item))
        if row is None:
            raise BadRequest(
                f"item '{item}' is not in this bundle's catalogue; send only items it was trained "
                "on"
            )
        return row


class Encoder:
    """Turns `Behaviours` into `Encoded` for one bundle: its catalogue, its tasks' columns and
    thresholds, its user features.
    """

    def __init__(
        self,
        ids: ItemIds,
        tasks: Mapping[str, Mapping[str, Any]],
        user_cardinalities: Mapping[str, int],
    ) -> None:
        self.ids, self.user_cardinalities = ids, dict(user_cardinalities)
        self.tasks = {
            name: (str(task["column"]), float(task["threshold"])) for name, task in tasks.items()
        }

    def encode(self, given: Behaviours | None) -> Encoded:
        """Checked and looked up; every refusal is a `BadRequest` that says what to send instead."""
        if given is None:
            given = Behaviours([], [])
        rows_T = self.ids.rows(given.items)
        times_T = whole_numbers("timestamps", given.timestamps)
        if times_T.size != rows_T.numel():
            raise BadRequest(
                f"{rows_T.numel()} items but {times_T.size} timestamps; send one timestamp per item"
            )
        if times_T.size and (int(times_T.min()) <= -_MAX_TIME or int(times_T.max()) >= _MAX_TIME):
            raise BadRequest("timestamps must stay within -2^62 and 2^62")
        return Encoded(
            rows_T,
            torch.from_numpy(times_T),
            self._labels_TA(given, rows_T.numel()),
            self._user(given),
        )

    def _labels_TA(self, given: Behaviours, count: int) -> torch.Tensor:
        if not self.tasks:
            return torch.zeros(count, 0)
        columns = []
        for column, threshold in self.tasks.values():
            values = (given.actions or {}).get(column)
            if values is None and count:
                raise BadRequest(
                    f"this bundle reads the action '{column}' of every behaviour; send "
                    f"actions.{column}"
                )
            values_T = _numbers(f"actions.{column}", values if values is not None else [])
            if values_T.size != count:
                raise BadRequest(
                    f"{count} items but {values_T.size} values of action '{column}'; send one "
                    "value per item"
                )
            columns.append(torch.from_numpy(values_T >= threshold))
        return torch.stack(columns, dim=1).float()

    def _user(self, given: Behaviours) -> dict[str, int]:
        codes = {}
        for name, cardinality in self.user_cardinalities.items():
            code = (given.user or {}).get(name, 0)
            if isinstance(code, bool) or not isinstance(code, int) or not 0 <= code < cardinality:
                raise BadRequest(
                    f"user feature '{name}' must be a code from 0 to {cardinality - 1}, got "
                    f"{code!r}"
                )
            codes[name] = code
        return codes


def whole_numbers(noun: str, values: Any) -> np.ndarray:
    """int64, never by way of float."""
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


def _numbers(noun: str, values: Any) -> np.ndarray:
    try:
        array = np.asarray(
            values.numpy() if isinstance(values, torch.Tensor) else values, dtype=np.float32
        )
    except (ValueError, TypeError, OverflowError) as error:
        raise BadRequest(f"{noun} must be a flat list of numbers") from error
    if array.ndim != 1 or not np.isfinite(array).all():
        raise BadRequest(f"{noun} must be a flat list of finite numbers")
    return array


def _plain_list(items: Any) -> list[object]:
    return items.tolist() if isinstance(items, np.ndarray | torch.Tensor) else list(items)
