"""Session traces of the serving benchmark: which user sends a request when, with which history.

A session is a sequence of one user's real behaviours with no gap above half an hour; every `PAGE`
behaviours the user requests a page. The pages of a visit and their gaps are the log's own. Time is
rescaled twice: session starts to reach the wanted rate, gaps within a session by `GAP_SCALE` (and
never below `SHORTEST_GAP`, the time a page takes to answer). What users did before the log is not
known; every user gets a history of a stated length, random items, own times. Touch this when
another log should give the arrivals.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from slipstream.history.user_history import History

PAGE = 6
SESSION_GAP = 1800.0
GAP_SCALE, SHORTEST_GAP = 1 / 100, 0.5
SHORT_SHARE, SHORT_LENGTH = 0.25, 64  # short histories, which need no relay
_GROWTH = 4096


@dataclass(frozen=True)
class Session:
    """One user's visit: when it begins, and when pages are requested after that (seconds)."""

    user: int
    start: float
    pages: tuple[float, ...]


@dataclass(frozen=True)
class Request:
    """The `page`-th page of a session, at a scheduled time."""

    at: float
    user: int
    page: int


def real_sessions(
    wanted: Sequence[str] = ("MovieLens latest-small", "KuaiRand-Pure"),
) -> tuple[str, list[Session]] | None:
    """Read the sessions of the first of these logs in the folders of `$SLIPSTREAM_DATA`.

    MovieLens comes first: its users rate page after page. The public part of KuaiRand-Pure keeps
    few rows of a visit, so nearly every session has one page, and nothing can be used twice.
    """
    folders = [
        Path(folder) for folder in os.environ.get("SLIPSTREAM_DATA", "data").split(os.pathsep)
    ]
    for name in wanted:
        for folder in folders:
            logs = sorted((folder / "kuairand-pure").glob("log_standard_*.parquet"))
            ratings = folder / "ml-latest-small" / "ratings.csv.gz"
            if name == "KuaiRand-Pure" and logs:
                frame = pl.concat(
                    [pl.read_parquet(path, columns=["user_id", "time_ms"]) for path in logs]
                )
                return name, sessions_of(
                    frame["user_id"].to_numpy(), frame["time_ms"].to_numpy() / 1000.0
                )
            if name == "MovieLens latest-small" and ratings.is_file():
                frame = pl.read_csv(ratings, columns=["userId", "timestamp"])
                return name, sessions_of(
                    frame["userId"].to_numpy(), frame["timestamp"].to_numpy().astype(float)
                )
    return None


def synthetic_sessions(count: int = 4000, seed: int = 0) -> list[Session]:
    """Draw geometric numbers of pages, exponential gaps of a minute, Poisson starts."""
    rng = np.random.default_rng(seed)
    starts = np.cumsum(rng.exponential(10.0, count))
    sessions = []
    for user, start in enumerate(starts.tolist()):
        gaps = rng.exponential(60.0, min(40, int(rng.geometric(0.25))) - 1)
        sessions.append(Session(user, start, (0.0, *np.cumsum(gaps).tolist())))
    return sessions


def sessions_of(users_N: np.ndarray, seconds_N: np.ndarray) -> list[Session]:
    """Cut a log into sessions, in order of their beginning."""
    order = np.lexsort((seconds_N, users_N))
    users, seconds = users_N[order], seconds_N[order]
    breaks = np.flatnonzero((np.diff(users) != 0) | (np.diff(seconds) > SESSION_GAP)) + 1
    sessions = []
    for begin, end in zip(np.r_[0, breaks], np.r_[breaks, users.size], strict=True):
        pages = seconds[begin:end:PAGE] - seconds[begin]
        sessions.append(Session(int(users[begin]), float(seconds[begin]), tuple(pages.tolist())))
    return sorted(sessions, key=lambda session: session.start)


def replay(sessions: list[Session], rate: float, seconds: float, seed: int = 0) -> list[Request]:
    """Make the requests of `seconds` at `rate` a second on average, rescaled.

    A log spans years and its habits change, so sessions are taken in even strides from all of it:
    every rate gets the same mix of long and short visits. Sessions already running at the start are
    included from their current page on.
    """
    mean_pages = float(np.mean([len(session.pages) for session in sessions]))
    lead = 120.0  # seconds of sessions before the window, so that it opens in the middle of things
    needed = max(2, int(rate / mean_pages * (seconds + lead)))
    stride = next(
        step
        for step in range(int(0.618 * len(sessions)) or 1, 2 * len(sessions))
        if math.gcd(step, len(sessions)) == 1
    )
    places = (
        int(np.random.default_rng(seed).integers(0, len(sessions))) + np.arange(needed) * stride
    ) % len(sessions)
    chosen = [sessions[place] for place in places.tolist()]
    ranks = np.linspace(
        0.0, 1.0, needed
    )  # starts by order, evenly: the log's days and nights would swamp seconds
    found = []
    for number, (session, rank) in enumerate(zip(chosen, ranks.tolist(), strict=True)):
        time = rank * (seconds + lead) - lead
        last = 0.0
        for page, offset in enumerate(session.pages):
            time += max(SHORTEST_GAP, (offset - last) * GAP_SCALE) if page else 0.0
            last = offset
            if 0.0 <= time < seconds:
                found.append(Request(time, number * 1_000_003 + session.user, page))
    return sorted(found, key=lambda request: request.at)


def poisson(requests: list[Request], rate: float, seed: int = 0) -> list[Request]:
    """Put the same requests in the same order at Poisson times."""
    times = np.cumsum(np.random.default_rng(seed).exponential(1.0 / rate, len(requests)))
    return [
        Request(float(at), request.user, request.page)
        for at, request in zip(times, requests, strict=True)
    ]


class Histories:
    """Every user's behaviours, made from the user's number, so all processes see the same."""

    def __init__(
        self, length: int, first_id: int, num_items: int, tasks: tuple[str, ...], max_len: int
    ) -> None:
        self.length, self.first_id, self.num_items, self.tasks, self.max_len = (
            length,
            first_id,
            num_items,
            tasks,
            max_len,
        )
        self._made: dict[int, History] = {}
        self._short: dict[int, bool] = {}

    def length_of(self, user: int, page: int) -> int:
        """Return the behaviours of a user at a page."""
        short = self._short.get(user)
        if short is None:
            short = self._short[user] = bool(np.random.default_rng(user).random() < SHORT_SHARE)
        return min(self.max_len, (SHORT_LENGTH if short else self.length) + PAGE * page)

    def of(self, user: int, page: int) -> History:
        """Return the history of a user at a page, oldest first."""
        if user not in self._made:
            if len(self._made) > 4096:
                self._made.clear()
            self._made[user] = self._make(user)
        whole, count = self._made[user], self.length_of(user, page)
        actions = {name: column[:count] for name, column in (whole.actions or {}).items()}
        return History(whole.items[:count], whole.timestamps[:count], actions)

    def candidates(self, user: int, page: int, count: int) -> np.ndarray:
        """Return what retrieval found for a page."""
        return self.first_id + np.random.default_rng([user, page]).integers(
            0, self.num_items, count
        )

    def _make(self, user: int) -> History:
        rng = np.random.default_rng(user)
        count = min(self.max_len, self.length + _GROWTH)
        actions = {name: (rng.random(count) < 0.3).astype(np.float32) for name in self.tasks}
        times = 1_600_000_000 + np.cumsum(rng.integers(1, 4000, count))
        return History(self.first_id + rng.integers(0, self.num_items, count), times, actions)
