"""Encodes a history (ids, times, actions) as the model reads it (rows, labels, codes).

Touch this when the model reads another column of a behaviour. A history that cannot be encoded is
the caller's error, whose text names what to send instead.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from slipstream.history.user_history import History
from slipstream.serving.engine.items import ItemIds, whole_numbers
from slipstream.serving.request_errors import BadRequest

_MAX_TIME = 1 << 62  # attention refuses times beyond this


@dataclass(frozen=True)
class EncodedHistory:
    """A history as the model reads it."""

    rows_T: torch.Tensor  # int64 rows of the item table
    timestamps_T: torch.Tensor  # int64
    labels_TA: torch.Tensor  # float32, a column per ranking task; no columns for retrieval
    user_features: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.rows_T.numel()

    def part(self, begin: int, end: int | None = None) -> "EncodedHistory":
        """Return behaviours `begin` to `end`, counted from the first one here."""
        cut = slice(begin, end)
        return EncodedHistory(
            self.rows_T[cut], self.timestamps_T[cut], self.labels_TA[cut], self.user_features
        )

    def then(self, later: "EncodedHistory") -> "EncodedHistory":
        """Return these behaviours followed by later ones of the same user."""
        if not len(later):
            return self
        return EncodedHistory(
            torch.cat([self.rows_T, later.rows_T]),
            torch.cat([self.timestamps_T, later.timestamps_T]),
            torch.cat([self.labels_TA, later.labels_TA]),
            self.user_features if len(self) else later.user_features,
        )

    def digest(self, count: int | None = None) -> bytes:
        """Return 16 bytes that stand for the first `count` behaviours and the user's features.

        Equal digests mean equal prefixes.
        """
        whole = self if count is None else self.part(0, count)
        features = [code for _, code in sorted(self.user_features.items())]
        codes = np.array([len(features), *features], dtype=np.int64)
        digest = hashlib.blake2b(codes.tobytes(), digest_size=16)
        for column in (whole.rows_T, whole.timestamps_T, whole.labels_TA):
            digest.update(
                np.ascontiguousarray(column.numpy()).view(np.uint8).data if column.numel() else b"-"
            )
        return digest.digest()


class HistoryEncoder:
    """Encodes histories for one bundle: its catalogue, its tasks' columns, its user features."""

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

    def encode(self, given: History | None) -> EncodedHistory:
        """Check a history and look up its rows; a `BadRequest` names what to send."""
        if given is None:
            given = History([], [])
        rows_T = self.ids.rows(given.items)
        times_T = whole_numbers("timestamps", given.timestamps)
        if times_T.size != rows_T.numel():
            raise BadRequest(
                f"{rows_T.numel()} items but {times_T.size} timestamps; send one timestamp per item"
            )
        if times_T.size and (int(times_T.min()) <= -_MAX_TIME or int(times_T.max()) >= _MAX_TIME):
            raise BadRequest("timestamps must stay within -2^62 and 2^62")
        return EncodedHistory(
            rows_T,
            torch.from_numpy(times_T),
            self._labels_TA(given, rows_T.numel()),
            self._user_features(given),
        )

    def _labels_TA(self, given: History, count: int) -> torch.Tensor:
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

    def _user_features(self, given: History) -> dict[str, int]:
        codes = {}
        for name, cardinality in self.user_cardinalities.items():
            code = (given.user_features or {}).get(name, 0)
            if isinstance(code, bool) or not isinstance(code, int) or not 0 <= code < cardinality:
                raise BadRequest(
                    f"user feature '{name}' must be a code from 0 to {cardinality - 1}, got "
                    f"{code!r}"
                )
            codes[name] = code
        return codes


def _numbers(noun: str, values: Any) -> np.ndarray:
    """Return values as finite float32 numbers; `noun` names them in the error."""
    try:
        array = np.asarray(
            values.numpy() if isinstance(values, torch.Tensor) else values, dtype=np.float32
        )
    except (ValueError, TypeError, OverflowError) as error:
        raise BadRequest(f"{noun} must be a flat list of numbers") from error
    if array.ndim != 1 or not np.isfinite(array).all():
        raise BadRequest(f"{noun} must be a flat list of finite numbers")
    return array
