"""Traces of the serving benchmark: which user asks next, and who asked a short while before.

A session is a sequence of one user's real behaviours with no gap above half an hour. Page counts
and gaps are the log's own. A window is a piece of stationary traffic: sessions start at even rates,
and most of those that ask inside the window have begun before it. Times of the window only order
its requests; the generator and LoadGen give them Poisson arrivals. Touch this when another log
should give the sessions.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

SESSION_GAP = 1800.0
RATINGS_A_PAGE = 6  # of MovieLens; KuaiRand-Pure keeps few rows of a visit, so there each is a page
APPENDED = 6  # behaviours that a user adds between two pages
CIRCLE_LAPS = 3  # of a circle of users, before its window
MORE = 1.25  # a window is drawn somewhat longer than needed and cut


@dataclass(frozen=True)
class Log:
    """The sessions of one log: when pages are requested, in seconds after the first."""

    name: str
    sessions: tuple[np.ndarray, ...]

    @property
    def mean_pages(self) -> float:
        """Pages of a session."""
        return float(np.mean([len(pages) for pages in self.sessions]))


@dataclass(frozen=True)
class Request:
    """One page; `user` counts the users of a window, `again` says that the user asked before."""

    user: int
    again: bool


@dataclass(frozen=True)
class Window:
    """Requests in their order, and the users who asked shortly before it, oldest first."""

    requests: tuple[Request, ...]
    before: tuple[int, ...]

    @property
    def users(self) -> int:
        """How many users ask."""
        return 1 + max(request.user for request in self.requests)


def real_logs() -> list[Log]:
    """Read both logs from the folders of `$SLIPSTREAM_DATA`; those that are there."""
    folders = os.environ.get("SLIPSTREAM_DATA", "data").split(os.pathsep)
    found = []
    for folder in map(Path, folders):
        ratings = folder / "ml-latest-small" / "ratings.csv.gz"
        if ratings.is_file():
            frame = pl.read_csv(ratings, columns=["userId", "timestamp"])
            times_N = frame["timestamp"].to_numpy().astype(float)
            sessions = cut_sessions(frame["userId"].to_numpy(), times_N, RATINGS_A_PAGE)
            found.append(Log("MovieLens latest-small", sessions))
        rows = sorted((folder / "kuairand-pure").glob("log_standard_*.parquet"))
        if rows:
            parts = [pl.read_parquet(path, columns=["user_id", "time_ms"]) for path in rows]
            frame = pl.concat(parts)
            times_N = frame["time_ms"].to_numpy() / 1000.0
            sessions = cut_sessions(frame["user_id"].to_numpy(), times_N, 1)
            found.append(Log("KuaiRand-Pure", sessions))
    return found


def synthetic_log(count: int = 4000, seed: int = 0) -> Log:
    """Draw sessions where no log is at hand: geometric pages, gaps of a minute on average."""
    rng = np.random.default_rng(seed)
    pages = np.minimum(40, rng.geometric(0.25, count))
    gaps = [rng.exponential(60.0, number - 1) for number in pages.tolist()]
    return Log("synthetic sessions", tuple(np.r_[0.0, np.cumsum(each)] for each in gaps))


def cut_sessions(
    users_N: np.ndarray, seconds_N: np.ndarray, rows_a_page: int
) -> tuple[np.ndarray, ...]:
    """Cut a log into sessions and these into pages."""
    order = np.lexsort((seconds_N, users_N))
    users_N, seconds_N = users_N[order], seconds_N[order]
    breaks = np.flatnonzero((np.diff(users_N) != 0) | (np.diff(seconds_N) > SESSION_GAP)) + 1
    parts = np.split(seconds_N, breaks)
    return tuple(part[::rows_a_page] - part[0] for part in parts if part.size)


def session_window(
    logs: Sequence[Log], rate: float, count: int, *, kept: float, seed: int
) -> Window:
    """Draw `count` requests at `rate` a second, half of the sessions from each of two logs.

    A page whose predecessor lies outside the window counts as `again`, and its user as `before`,
    where fewer than `kept` requests lie between the two.
    """
    rng = np.random.default_rng(seed)
    seconds = MORE * count / rate + 1.0
    starts = rate / float(np.mean([log.mean_pages for log in logs]))  # sessions a second
    drawn: list[tuple[float, int, bool]] = []  # when, whose, not the first page
    earlier: dict[int, float] = {}  # when the page before the window was requested
    users = 0
    for log in logs:
        lasting_S = np.array([pages[-1] for pages in log.sessions])
        reach_S = seconds + lasting_S
        expected = starts / len(logs) / len(log.sessions) * reach_S.sum()
        chosen = rng.choice(lasting_S.size, rng.poisson(expected), p=reach_S / reach_S.sum())
        begins = -lasting_S[chosen] + rng.random(chosen.size) * reach_S[chosen]
        for place, begin in zip(chosen.tolist(), begins.tolist(), strict=True):
            pages = begin + log.sessions[place]
            first, last = np.searchsorted(pages, [0.0, seconds])
            if first == last:
                continue
            known = bool(first) and rate * (pages[first] - pages[first - 1]) < kept
            if known:
                earlier[users] = float(pages[first - 1])
            drawn += [
                (float(at), users, known or number > 0)
                for number, at in enumerate(pages[first:last])
            ]
            users += 1
    return _window(sorted(drawn)[:count], earlier)


def _window(drawn: list[tuple[float, int, bool]], earlier: dict[int, float]) -> Window:
    """Number the users in the order of their first request."""
    numbers: dict[int, int] = {}
    requests = []
    for _, user, again in drawn:
        requests.append(Request(numbers.setdefault(user, len(numbers)), again))
    before = sorted((at, numbers[user]) for user, at in earlier.items() if user in numbers)
    return Window(tuple(requests), tuple(number for _, number in before))


def single_window(count: int) -> Window:
    """Make `count` requests of users who ask once (trace N)."""
    return Window(tuple(Request(user, False) for user in range(count)), ())


def rotating_window(count: int, users: int) -> Window:
    """Make requests of a fixed circle of users, who all have asked before, `CIRCLE_LAPS` times.

    In the first lap nobody comes back, in the second a server learns that they do and keeps their
    prefixes, from the third on it finds them.
    """
    return Window(
        tuple(Request(place % users, True) for place in range(count)),
        CIRCLE_LAPS * tuple(range(users)),
    )


def poisson_times(rate: float, count: int, seed: int) -> np.ndarray:
    """Draw arrivals in seconds."""
    return np.cumsum(np.random.default_rng(seed).exponential(1.0 / rate, count))


def stage_times(mean: float, variation: float, longest: float, count: int, seed: int) -> np.ndarray:
    """Draw how long the stage before ranking takes: a gamma distribution, cut at `longest`."""
    shape = 1.0 / variation**2
    drawn = np.random.default_rng(seed).gamma(shape, mean / shape, count)
    return np.minimum(drawn, longest)
