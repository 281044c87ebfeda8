"""The contest's data as every contender sees it: histories, questions, ranked answers.

Touch it when the arrays of the split file change. Like contest_io.py, which offers it on, it takes
numpy and the standard library only, and Python 3.9 suffices.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

VALIDATION, TEST = "validation", "test"


class Split:
    """The behaviours of all users, and which of them train, validate and test.

    `question` is "validation" (the history is the training part) or "test" (the history is the
    training part and the validation item).
    """

    def __init__(self, path: Path) -> None:
        with np.load(path) as arrays:
            self.users_N = arrays["users_N"].astype(np.int64)
            self.items_N = arrays["items_N"].astype(np.int64)
            self.times_N = arrays["times_N"].astype(np.int64)
            self.offsets_U1 = arrays["offsets_U1"].astype(np.int64)
            self.train_lengths_U = arrays["train_lengths_U"].astype(np.int64)
            self.validation_U = arrays["validation_U"].astype(np.int64)
            self.test_U = arrays["test_U"].astype(np.int64)
            self.validation_times_U = arrays["validation_times_U"].astype(np.int64)
            self.test_times_U = arrays["test_times_U"].astype(np.int64)
            self.num_items = int(arrays["num_items"].item())
            self.timed = bool(arrays["timed"].item())
        self.num_users = len(self.offsets_U1) - 1
        self._lengths = {
            VALIDATION: self.train_lengths_U,
            TEST: self.train_lengths_U + (self.validation_U >= 0),
        }
        # Items that no training behaviour names are never answered: no library learns them.
        self.trained_I = np.zeros(self.num_items, dtype=bool)
        self.trained_I[self.items_N[self.rows(VALIDATION)]] = True

    def targets(self, question: str) -> np.ndarray:
        """Return the item that each user is asked for, -1 where none is."""
        return self.validation_U if question == VALIDATION else self.test_U

    def lengths(self, question: str) -> np.ndarray:
        """Return how many behaviours of each user the question shows."""
        return self._lengths[question]

    def askers(self, question: str) -> np.ndarray:
        """Return the users with a history and an item to find."""
        return np.flatnonzero((self.targets(question) >= 0) & (self.lengths(question) > 0))

    def asked_times(self, question: str, request_time: bool) -> np.ndarray:
        """Return when each user asks: at the request, or at the last behaviour of the history."""
        last_U = self.offsets_U1[:-1] + np.maximum(self.lengths(question), 1) - 1
        last_times_U = self.ordered_times()[np.minimum(last_U, len(self.times_N) - 1)]
        if not request_time:
            return last_times_U
        times_U = self.validation_times_U if question == VALIDATION else self.test_times_U
        return np.maximum(times_U, last_times_U)

    def ordered_times(self) -> np.ndarray:
        """Return the times, raised only where one is below an earlier one of the same user."""
        first = int(self.times_N.min())
        shift_N = self.users_N * (int(self.times_N.max()) - first + 1)
        return np.maximum.accumulate(self.times_N - first + shift_N) - shift_N + first

    def history(self, user: int, question: str) -> np.ndarray:
        """Return the items of one user's history, oldest first."""
        start = int(self.offsets_U1[user])
        return self.items_N[start : start + int(self.lengths(question)[user])]

    def rows(self, question: str, users_B: np.ndarray | None = None) -> np.ndarray:
        """Return which of the N behaviours make the histories of these users, or of all."""
        if users_B is None:
            users_B = np.arange(self.num_users)
        return ragged(self.offsets_U1[users_B], self.lengths(question)[users_B])[2]

    def padded(
        self,
        users_B: np.ndarray,
        question: str,
        length: int,
        values_N: np.ndarray | None = None,
        pad: int = 0,
        left: bool = True,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the last `length` values of each history, padded left or right, and the counts.

        Values are item rows unless others, one for each behaviour, are given.
        """
        values_N = self.items_N if values_N is None else values_N
        whole_B = self.lengths(question)[users_B]
        counts_B = np.minimum(whole_B, length)
        starts_B = self.offsets_U1[users_B] + whole_B - counts_B
        owners, columns, sources = ragged(starts_B, counts_B)
        if left:
            columns = columns + (length - counts_B)[owners]
        values_BL = np.full((len(users_B), length), pad, dtype=np.int64)
        values_BL[owners, columns] = values_N[sources]
        return values_BL, counts_B

    def best_rows(
        self, scores_BI: np.ndarray, users_B: np.ndarray, question: str, k: int
    ) -> np.ndarray:
        """Return the k best item rows of each user, without what the user has seen."""
        scores_BI = np.array(scores_BI, dtype=np.float32)
        scores_BI[:, ~self.trained_I] = -np.inf
        lengths_B = self.lengths(question)[users_B]
        owners, _, sources = ragged(self.offsets_U1[users_B], lengths_B)
        scores_BI[owners, self.items_N[sources]] = -np.inf
        return largest(scores_BI, k)

    def answer(
        self, question: str, k: int, score: Callable[[np.ndarray], np.ndarray], batch: int = 256
    ) -> np.ndarray:
        """Rank the catalogue for every asker by score(users), `batch` users at a time."""
        top_UK = np.full((self.num_users, k), -1, dtype=np.int64)
        users_A = self.askers(question)
        for start in range(0, len(users_A), batch):
            users_B = users_A[start : start + batch]
            top_UK[users_B] = self.best_rows(score(users_B), users_B, question, k)
        return top_UK


def ragged(starts_B: np.ndarray, lengths_B: np.ndarray) -> tuple[np.ndarray, ...]:
    """Lay runs end to end: for each entry its run, its place in the run, and its index."""
    owners = np.repeat(np.arange(len(lengths_B)), lengths_B)
    within = np.arange(len(owners)) - np.repeat(np.cumsum(lengths_B) - lengths_B, lengths_B)
    return owners, within, starts_B[owners] + within


def largest(scores_BI: np.ndarray, k: int) -> np.ndarray:
    """Return the columns of the k largest finite scores of each row, best first, then -1."""
    kept = min(k, scores_BI.shape[1])
    found_BK = np.argpartition(scores_BI, -kept, axis=1)[:, -kept:]
    values_BK = np.take_along_axis(scores_BI, found_BK, axis=1)
    order_BK = np.argsort(-values_BK, axis=1, kind="stable")
    top_BK = np.full((len(scores_BI), k), -1, dtype=np.int64)
    top_BK[:, :kept] = np.take_along_axis(found_BK, order_BK, axis=1)
    hidden_BK = ~np.isfinite(np.take_along_axis(values_BK, order_BK, axis=1))
    top_BK[:, :kept][hidden_BK] = -1
    return top_BK
