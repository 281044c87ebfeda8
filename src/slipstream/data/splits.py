"""Which behaviours train, and which are held out for validation and test.

Whatever the rule, each log has three parts, one after the other: training, validation, test. Any of
them may be empty. Touch this when behaviours are held out in another way; everything else asks
`train_lengths` and `held_out`.
"""

import math
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

import numpy as np

from slipstream.data.store import SequenceStore
from slipstream.errors import SlipstreamError

Which = Literal["validation", "test"]
RULES = ("last", "time", "users")
_USER_DRAWS = 0x5E7  # seed of the users that a split by users holds out


class HeldOutPart(NamedTuple):
    """The held-out behaviours of each log: places `begins_U[u]:ends_U[u]`."""

    begins_U: np.ndarray
    ends_U: np.ndarray


def described(default: Any, about: str) -> Any:
    """Return a field with a default and the line that the recipe reference shows for it."""
    return field(default=default, metadata={"about": about})


@dataclass(frozen=True)
class Split:
    """How behaviours are held out.

    `last`: the last behaviours of each log, first `validation`, then `test` of them. A log too
    short to leave one for training is not split: all of it trains, none of it is evaluated.
    `time`: everything from one moment on; the same for all users. `validation` and `test` are
    shares of all behaviours by time, or the moments are `validation_from` and `test_from`. A log's
    first behaviour is never asked for, because nothing is known before it.
    `users`: `validation` and `test` are shares of the users. Nothing of them trains; the last
    behaviour of each is asked for, given all that came before it.
    """

    validation: int | float = described(
        1, "last: behaviours; time: a share of them; users: a share of users"
    )
    test: int | float = described(1, "the same for the test")
    by: Literal["last", "time", "users"] = described(
        "last",
        "what is held out: the last behaviours of each log, everything from one moment on, or the "
        "last behaviour of some users",
    )
    validation_from: int | str | None = described(
        None, "time: first moment of validation (seconds or ISO text), instead of shares"
    )
    test_from: int | str | None = described(
        None, "time: first moment of the test, instead of shares"
    )

    def __post_init__(self) -> None:
        sizes, moments = (self.validation, self.test), (self.validation_from, self.test_from)
        if self.by not in RULES:
            raise ValueError(f"split.by is one of {', '.join(RULES)}, got {self.by!r}")
        if moments != (None, None) and self.by != "time":
            raise ValueError("split.validation_from and split.test_from need split.by=time")
        if self.by == "last":
            if any(not isinstance(size, int) or size < 0 for size in sizes):
                raise ValueError(f"a split holds out 0 or more behaviours, got {self}")
        elif moments == (None, None):
            if any(not 0 <= size < 1 for size in sizes) or sum(sizes) >= 1:
                noun = "behaviours" if self.by == "time" else "users"
                either = " (or split.validation_from and split.test_from)" * (self.by == "time")
                raise ValueError(
                    f"split.by={self.by} needs shares of the {noun}, for example "
                    f"split.validation=0.1 and split.test=0.1{either}, got {sizes[0]} and "
                    f"{sizes[1]}"
                )
        elif None in moments:
            raise ValueError("split.validation_from and split.test_from need each other; give both")
        elif seconds_of(moments[0]) > seconds_of(moments[1]):
            raise ValueError("split.validation_from must not be later than split.test_from")

    def train_lengths(self, store: SequenceStore) -> np.ndarray:
        """Return how many behaviours of each log train."""
        lengths_U = store.lengths_U
        if self.by == "last":
            held_out = int(self.validation + self.test)
            return np.where(lengths_U > held_out, lengths_U - held_out, lengths_U)
        if self.by == "time":
            return _counts_before(store, self._moments(store)[0])
        draws_U = _user_draws(store.num_users)
        return np.where(draws_U < self.validation + self.test, 0, lengths_U)

    def held_out(self, store: SequenceStore, which: Which) -> HeldOutPart:
        """Return the behaviours of each log that are asked for; those of most may be none."""
        if which not in ("validation", "test"):
            raise ValueError(f"split must be 'validation' or 'test', got {which!r}")
        lengths_U, train_U = store.lengths_U, self.train_lengths(store)
        if self.by == "users":
            draws_U, low = _user_draws(store.num_users), 0.0 if which == "test" else self.test
            high = self.test if which == "test" else self.test + self.validation
            asked_U = (low <= draws_U) & (draws_U < high) & (lengths_U > 1)
            return HeldOutPart(lengths_U - asked_U, lengths_U)
        if self.by == "time":
            border_U = _counts_before(store, self._moments(store)[1])
        else:
            border_U = np.where(train_U < lengths_U, lengths_U - int(self.test), lengths_U)
        begins_U, ends_U = (train_U, border_U) if which == "validation" else (border_U, lengths_U)
        return HeldOutPart(np.minimum(np.maximum(begins_U, 1), ends_U), ends_U)

    def identity(self) -> list[Any]:
        """Return what must be the same for the same parts."""
        sizes = [self.validation, self.test]
        if self.by == "last":
            return sizes
        return [self.by, *sizes, self.validation_from, self.test_from]

    def _moments(self, store: SequenceStore) -> tuple[float, float]:
        """Return the first second of validation and of test."""
        if not store.timed:
            raise SlipstreamError(
                f"{store.directory} has no times, so it cannot be split by time; use "
                "split.by=last or split.by=users"
            )
        if self.validation_from is not None and self.test_from is not None:
            return seconds_of(self.validation_from), seconds_of(self.test_from)
        count = store.num_behaviours
        test = round(count * self.test)
        places = [count - test - round(count * self.validation), count - test]
        inside = [place for place in places if place < count]
        times_N = np.partition(store.timestamps_N, inside) if inside else store.timestamps_N
        first, second = (float(times_N[p]) if p < count else math.inf for p in places)
        return first, second


def seconds_of(moment: int | str | None) -> float:
    """Return a moment, seconds or ISO text (UTC unless it says otherwise), in seconds."""
    if not isinstance(moment, str):
        return float(moment or 0)
    try:
        read = datetime.fromisoformat(moment.strip())
    except ValueError as error:
        raise ValueError(
            f"'{moment}' is no moment; write seconds, or ISO text such as 2024-05-01T12:30:00"
        ) from error
    return (read if read.tzinfo else read.replace(tzinfo=UTC)).timestamp()


def _counts_before(store: SequenceStore, moment: float) -> np.ndarray:
    """Return how many behaviours of each log are earlier than a moment."""
    before_N1 = np.zeros(store.num_behaviours + 1, dtype=np.int64)
    np.cumsum(store.timestamps_N < moment, out=before_N1[1:])
    return np.diff(before_N1[store.offsets_U1])


def _user_draws(num_users: int) -> np.ndarray:
    """Return a number in [0, 1) per user; more users do not change those of the first ones."""
    return np.random.default_rng(_USER_DRAWS).random(num_users)
