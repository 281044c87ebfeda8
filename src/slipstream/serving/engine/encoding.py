"""Encodes a history (ids, times, actions) as the model reads it (rows, labels, codes).

Touch this when the model reads another column of a behaviour. A history that cannot be encoded is
the caller's error, whose text names what to send instead.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from slipstream.bundle import Bundle
from slipstream.history.user_history import History
from slipstream.models.number_bins import bin_numbers
from slipstream.serving.engine.feature_rows import UserCodes
from slipstream.serving.engine.items import ItemIds, whole_numbers
from slipstream.serving.request_errors import BadRequest

_MAX_TIME = 1 << 62  # attention refuses times beyond this
_MAX_VALUES = 1000  # of one user feature
_MOST_RECENT = 512  # stored histories whose encoding is kept


@dataclass(frozen=True)
class EncodedHistory:
    """A history as the model reads it."""

    rows_T: torch.Tensor  # int64 rows of the item table
    timestamps_T: torch.Tensor  # int64
    labels_TA: torch.Tensor  # float32, a column per ranking task; no columns for retrieval
    user_features: UserCodes = field(default_factory=dict)
    context: Mapping[str, torch.Tensor] = field(default_factory=dict)  # int64 codes [T], by column
    _digests: dict[int, bytes] = field(default_factory=dict, compare=False, repr=False)

    def __len__(self) -> int:
        return self.rows_T.numel()

    def part(self, begin: int, end: int | None = None) -> "EncodedHistory":
        """Return behaviours `begin` to `end`, counted from the first one here."""
        if not begin and (end is None or end >= len(self)):
            return self
        cut = slice(begin, end)
        return EncodedHistory(
            self.rows_T[cut],
            self.timestamps_T[cut],
            self.labels_TA[cut],
            self.user_features,
            {name: codes_T[cut] for name, codes_T in self.context.items()},
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
            {name: torch.cat([each, later.context[name]]) for name, each in self.context.items()},
        )

    def digest(self, count: int | None = None) -> bytes:
        """Return 16 bytes for the first `count` behaviours, their context and the user's features.

        Equal digests mean equal prefixes. Each is computed once.
        """
        count = len(self) if count is None else count
        if count not in self._digests:
            self._digests[count] = self._digest(count)
        return self._digests[count]

    def _digest(self, count: int) -> bytes:
        whole = self.part(0, count)
        features: list[int] = []
        for _, code in sorted(self.user_features.items()):  # several values: after their number
            features += [code] if isinstance(code, int) else [-len(code), *code]
        codes = np.array([len(self.user_features), *features], dtype=np.int64)
        digest = hashlib.blake2b(codes.tobytes(), digest_size=16)
        context = [codes_T for _, codes_T in sorted(whole.context.items())]
        for column in (whole.rows_T, whole.timestamps_T, whole.labels_TA, *context):
            digest.update(
                np.ascontiguousarray(column.numpy()).view(np.uint8).data if column.numel() else b"-"
            )
        return digest.digest()


@dataclass(frozen=True)
class UserFeature:
    """How the values of one user feature become codes; code 0 is "unknown"."""

    cardinality: int
    kind: str = "category"  # category, categories or number
    labels: Mapping[str, int] = field(default_factory=dict)  # code of each text
    edges: Sequence[float] = ()  # between the bins of a number

    def encode(self, name: str, value: Any) -> int | tuple[int, ...]:
        """Return the code of a value, or the codes of several; None is not known."""
        if self.kind == "number":
            return self._bin(name, value)
        if self.kind == "category":
            return self._code(name, value)
        values = value if isinstance(value, list | tuple) else [value]
        if len(values) > _MAX_VALUES:
            raise BadRequest(
                f"user feature '{name}' has {len(values)} values; send at most {_MAX_VALUES}"
            )
        codes = {self._code(name, each) for each in values} - {0}
        return tuple(sorted(codes)) or (0,)  # as in training

    def _code(self, name: str, value: Any) -> int:
        if value is None:
            return 0
        if isinstance(value, str) and self.labels:
            return self.labels.get(value, 0)
        whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
        if whole and 0 <= value < self.cardinality:
            return int(value)
        text = "one of its labels as text, or " if self.labels else ""
        raise BadRequest(
            f"user feature '{name}' must be {text}a code from 0 to {self.cardinality - 1}, got "
            f"{value!r:.80}"
        )

    def _bin(self, name: str, value: Any) -> int:
        if value is None:
            return 0
        numeric = isinstance(value, int | float | np.number) and not isinstance(value, bool)
        try:
            number = float(value) if numeric else None
        except OverflowError:
            number = None
        if number is None:
            raise BadRequest(f"user feature '{name}' must be a number, got {value!r:.80}")
        with np.errstate(over="ignore"):
            return int(bin_numbers(np.array([number]), self.edges)[0])


def user_features_of(bundle: Bundle) -> dict[str, UserFeature]:
    """Return how the user features of a bundle are encoded, in the order of its model."""
    told, sizes = bundle.description, bundle.description["sizes"]
    kinds, labels = sizes.get("user_kinds", {}), told.get("user_labels", {})
    edges = told.get("number_edges", {})
    return {
        name: UserFeature(
            cardinality,
            kinds.get(name, "category"),
            {label: code for code, label in enumerate(labels.get(name, []))},
            edges.get(f"user.{name}", ()),
        )
        for name, cardinality in sizes["user_cardinalities"].items()
    }


def context_codes_of(bundle: Bundle) -> dict[str, dict[str, int]]:
    """Return the code of every label of the context columns a bundle reads."""
    labels = bundle.description.get("context_labels", {})
    return {name: {text: code for code, text in enumerate(each)} for name, each in labels.items()}


class HistoryEncoder:
    """Encodes histories for one bundle: its catalogue, its tasks' columns, its user features.

    `context` has the codes of labels by context column; a label that is not there is unknown. Where
    the log had no times (`timed` is off), every time is 0.
    """

    def __init__(
        self,
        ids: ItemIds,
        tasks: Mapping[str, Mapping[str, Any]],
        user_features: Mapping[str, UserFeature],
        context: Mapping[str, Mapping[str, int]] | None = None,
        *,
        timed: bool = True,
    ) -> None:
        self.ids, self.timed, self.context = ids, timed, dict(context or {})
        self._user = dict(user_features)
        self._recent: dict[tuple[object, int, int], EncodedHistory] = {}
        self.features = tuple(self._user)
        self.tasks = {
            name: (str(task["column"]), float(task["threshold"])) for name, task in tasks.items()
        }
        self._nothing = self._encode(History([], []))

    def encode(self, given: History | None) -> EncodedHistory:
        """Check a history and look up its rows; a `BadRequest` names what to send.

        None stands for no behaviours. A stored history is encoded once, while it stays the same.
        """
        if given is None:
            return self._nothing
        if given.source is None or given.user_features:
            return self._encode(given)
        key = (given.source, given.first, len(given))
        encoded = self._recent.pop(key, None)
        if encoded is None:
            encoded = self._encode(given)
            self.ids.note_seen(given)
        self._recent[key] = encoded
        if len(self._recent) > _MOST_RECENT:
            self._recent.pop(next(iter(self._recent)))
        return encoded

    def _encode(self, given: History) -> EncodedHistory:
        rows_T = self.ids.rows(given.items)
        times_T = whole_numbers("timestamps", given.timestamps)
        if times_T.size != rows_T.numel():
            raise BadRequest(
                f"{rows_T.numel()} items but {times_T.size} timestamps; send one timestamp per item"
            )
        if times_T.size and (int(times_T.min()) <= -_MAX_TIME or int(times_T.max()) >= _MAX_TIME):
            raise BadRequest("timestamps must stay within -2^62 and 2^62")
        if not self.timed:
            times_T = np.zeros_like(times_T)
        return EncodedHistory(
            rows_T,
            torch.from_numpy(times_T),
            self._labels_TA(given, rows_T.numel()),
            self._user_features(given),
            self._context(given, rows_T.numel()),
        )

    def encode_request(self, context: Mapping[str, str | None] | None) -> dict[str, int]:
        """Return the codes of a request's own context, which its candidates have."""
        given = context or {}
        self._check_context(given)
        return {name: codes.get(given.get(name) or "", 0) for name, codes in self.context.items()}

    def _check_context(self, given: Mapping[str, Any]) -> None:
        for name in given:
            if name not in self.context:
                known = f"it reads {', '.join(self.context)}" if self.context else "leave it out"
                raise BadRequest(f"this bundle reads no context '{name:.80}'; {known}")

    def _context(self, given: History, count: int) -> dict[str, torch.Tensor]:
        """Return the codes of each behaviour; columns that the bundle does not read are left."""
        found = {}
        for name, codes in self.context.items():
            labels = (given.context or {}).get(name)
            if labels is None:
                found[name] = torch.zeros(count, dtype=torch.int64)
                continue
            if len(labels) != count:
                raise BadRequest(
                    f"{count} items but {len(labels)} labels of context '{name}'; send one label "
                    "per item"
                )
            found[name] = torch.tensor([codes.get(each, 0) for each in labels], dtype=torch.int64)
        return found

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

    def _user_features(self, given: History) -> dict[str, int | tuple[int, ...]]:
        values = given.user_features or {}
        for name in values:
            if name not in self._user:
                known = f"it reads {', '.join(self._user)}" if self._user else "leave features out"
                raise BadRequest(f"this bundle reads no user feature '{name:.80}'; {known}")
        return {name: each.encode(name, values.get(name)) for name, each in self._user.items()}


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
