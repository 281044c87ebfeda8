"""The users of the serving benchmark: their lengths, what they did, and the store that holds it.

Everything follows from a user's number, so that an answer can be compared with the full pass. The
store is filled as a user fills one: a log, `slipstream data prepare`, `slipstream history import`.
Touch this when users have other histories.
"""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from benchmarks.served import child_environment
from benchmarks.serving.trace import APPENDED
from slipstream.errors import SlipstreamError
from slipstream.history.user_history import History

FIRST_ID, TASKS = 1 << 40, ("click", "like")
FIRST_TIME = 1_600_000_000
COMMAND_SECONDS = 600


@dataclass(frozen=True)
class Population:
    """Users of one length, or of lengths drawn from a lognormal distribution."""

    name: str
    users: int
    num_items: int
    length: int  # of every user, or the median
    sigma: float = 0.0
    longest: int = 2_048

    def length_of(self, user: int) -> int:
        """Return how many behaviours are stored of a user."""
        if not self.sigma:
            return self.length
        drawn = np.random.default_rng([self.length, user]).lognormal(
            np.log(self.length), self.sigma
        )
        return int(min(self.longest, max(16, drawn)))

    @property
    def mean_length(self) -> float:
        """The mean over all users."""
        return float(np.mean([self.length_of(user) for user in range(self.users)]))

    def id_of(self, user: int) -> str:
        """Return a user's id in the store."""
        return f"{self.name}-{user}"

    def history_of(self, user: int) -> History:
        """Return what is stored of a user at the start."""
        count = self.length_of(user)
        rng = np.random.default_rng([user, count])
        items = FIRST_ID + rng.integers(0, self.num_items, count)
        times = FIRST_TIME + np.cumsum(rng.integers(1, 4_000, count))
        actions = {task: (rng.random(count) < 0.3).astype(np.float32) for task in TASKS}
        return History(items, times, actions)

    def appended_by(self, user: int, page: int) -> History:
        """Return what a user adds before a page, later than all before it."""
        rng = np.random.default_rng([user, page, 1])
        times = FIRST_TIME + 4_000 * self.length_of(user) + 60 * page + np.arange(APPENDED)
        items = FIRST_ID + rng.integers(0, self.num_items, APPENDED)
        return History(items, times, dict.fromkeys(TASKS, np.ones(APPENDED, np.float32)))

    def candidates_of(self, user: int, page: int, count: int) -> list[int]:
        """Return the items that are ranked for a page."""
        rng = np.random.default_rng([user, page, 2])
        return [int(item) for item in FIRST_ID + rng.integers(0, self.num_items, count)]

    def write_store(self, folder: Path) -> Path:
        """Make the history store in `folder`, unless it is there, and return its file."""
        path = folder / f"{self.name}-{self.users}.db"
        if path.is_file():
            return path
        folder.mkdir(parents=True, exist_ok=True)
        log, prepared = folder / f"{self.name}.parquet", folder / f"{self.name}.store"
        self._write_log(log)
        columns = ["--action-columns", ",".join(TASKS), "--duplicates", "keep"]
        run_slipstream("data", "prepare", str(log), "--out", str(prepared), "--force", *columns)
        unfinished = path.with_suffix(".part")
        unfinished.unlink(missing_ok=True)
        run_slipstream("history", "import", str(prepared), "--history", f"sqlite:{unfinished}")
        log.unlink()
        unfinished.rename(path)
        return path

    def _write_log(self, path: Path) -> None:
        histories = [self.history_of(user) for user in range(self.users)]
        lengths = [len(history) for history in histories]
        ids = np.repeat([self.id_of(user) for user in range(self.users)], lengths)
        columns = {
            "user_id": ids,
            "item_id": np.concatenate([history.items for history in histories]),
            "timestamp": np.concatenate([history.timestamps for history in histories]),
        }
        for task in TASKS:
            columns[task] = np.concatenate([(each.actions or {})[task] for each in histories])
        pl.DataFrame(columns).write_parquet(path)


def run_slipstream(*words: str) -> str:
    """Run a command as a user types it and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "slipstream", *words],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS,
        check=False,
    )
    if done.returncode:
        raise SlipstreamError(f"`slipstream {' '.join(words[:2])} …` failed: {done.stderr[-1000:]}")
    return done.stdout
