"""The most popular items of the log a bundle was trained on, by windows of its last days.

They answer users of whom nothing is known. Touch this when such users are answered in another way;
what is counted is in training/popularity.py.
"""

from collections.abc import Callable, Mapping

import numpy as np

from slipstream.bundle import Bundle

ALL = 0  # the window of the whole log, in days


class PopularItems:
    """Rows by window of days, the most frequent first, with how often each occurs."""

    def __init__(self, windows: Mapping[int, tuple[np.ndarray, np.ndarray]]) -> None:
        self._windows = dict(windows)

    @classmethod
    def of(cls, bundle: Bundle) -> "PopularItems":
        """Read a bundle's popular items; an older bundle has none."""
        found = bundle.part("popular")
        return cls(
            {
                int(name.removesuffix("/rows")): (
                    rows.numpy(),
                    found[f"{name.removesuffix('/rows')}/counts"].numpy(),
                )
                for name, rows in found.items()
                if name.endswith("/rows")
            }
        )

    def mapped(self, rows_N: np.ndarray) -> "PopularItems":
        """Return the same items as rows of another catalogue; -1 in `rows_N`: it has no such."""
        windows = {}
        for days, (rows, counts) in self._windows.items():
            others = rows_N[rows]
            windows[days] = (others[others >= 0], counts[others >= 0])
        return PopularItems(windows)

    def __bool__(self) -> bool:
        return bool(self._windows)

    def best(
        self, count: int, days: int | None, allowed: Callable[[np.ndarray], np.ndarray]
    ) -> np.ndarray:
        """Return at most `count` allowed rows, the most popular of the last `days` first.

        Where a window has too few, those of longer windows follow.
        """
        found = np.empty(0, dtype=np.int64)
        for window in self._from(days):
            rows, _ = self._windows[window]
            rows = rows[~np.isin(rows, found)]
            found = np.concatenate([found, rows[allowed(rows)]])
            if len(found) >= count:
                break
        return found[:count]

    def counts_of(self, rows_C: np.ndarray, days: int | None) -> np.ndarray:
        """Return how often rows occur in the last `days`; 0 where they are not among the best."""
        if not self._windows:
            return np.zeros(len(rows_C), dtype=np.int64)
        rows, counts = self._windows[self._from(days)[0]]
        often = dict(zip(rows.tolist(), counts.tolist(), strict=True))
        return np.array([often.get(row, 0) for row in rows_C.tolist()], dtype=np.int64)

    def _from(self, days: int | None) -> list[int]:
        """Return the shortest window of at least `days`, then all longer ones."""
        limited = sorted(each for each in self._windows if each != ALL)
        long_enough = [each for each in limited if days is not None and each >= days]
        return [*long_enough, ALL] if ALL in self._windows else long_enough
