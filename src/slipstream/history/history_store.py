"""The history store: each user's behaviours, append only, so that a request may name a user instead
of carrying a history.

A behaviour is a record of fixed width (item, time, one float per action): appending is adding
bytes, reading the newest `n` is reading the last bytes. Behaviours keep their number for ever:
`first` is the number of the oldest one still kept. Two homes: `history_store_sqlite` (a file, many
processes on one machine) and `history_store_redis` (many machines), opened by URL.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from slipstream.errors import SlipstreamError
from slipstream.serving.http.messages import AppendRefused

KEEP = 65_536  # behaviours kept per user unless told otherwise


@dataclass(frozen=True)
class StoredHistory:
    """Behaviours `[first, total)` of a user, oldest first."""

    first: int
    items: np.ndarray
    timestamps: np.ndarray
    actions: dict[str, np.ndarray]

    @property
    def total(self) -> int:
        """Behaviours ever stored for this user."""
        return self.first + len(self.items)

    def part(self, begin: int, end: int) -> "StoredHistory":
        """Behaviours `[begin, end)` by their number."""
        cut = slice(begin - self.first, end - self.first)
        actions = {name: values[cut] for name, values in self.actions.items()}
        return StoredHistory(begin, self.items[cut], self.timestamps[cut], actions)


class HistoryStore(Protocol):
    """What both homes offer. Every call is a coroutine that leaves the event loop free."""

    records: "Records"

    async def append(self, user: str, history: StoredHistory, after: int | None = None) -> int:
        """Add behaviours, all or none; returns how many there are now. `AppendRefused` where time
        goes back or `after` is wrong.
        """

    async def read(self, user: str, limit: int, since: int | None = None) -> StoredHistory | None:
        """The newest `limit` behaviours, or those from number `since` on; None for a user never
        seen.
        """

    async def close(self) -> None:
        """Let go of files and connections."""


class Records:
    """Behaviours as bytes: one record each, with the deployment's actions in a fixed order."""

    def __init__(self, actions: tuple[str, ...]) -> None:
        self.actions = actions
        self._type = np.dtype(
            [("item", "<i8"), ("time", "<i8"), *((f"a:{name}", "<f4") for name in actions)]
        )
        self.width = self._type.itemsize

    def pack(self, history: StoredHistory) -> bytes:
        """Records of a history; an action it does not name counts as 0, one the store does not know
        is refused.
        """
        unknown = set(history.actions) - set(self.actions)
        if unknown:
            known = ", ".join(self.actions) or "none"
            raise AppendRefused(
                f"action '{min(unknown)}' is not one this model knows ({known}); leave it away"
            )
        table = np.zeros(len(history.items), dtype=self._type)
        table["item"], table["time"] = history.items, history.timestamps
        for name, values in history.actions.items():
            table[f"a:{name}"] = values
        return table.tobytes()

    def unpack(self, first: int, data: bytes) -> StoredHistory:
        table = np.frombuffer(data, dtype=self._type)
        actions = {name: table[f"a:{name}"].copy() for name in self.actions}
        return StoredHistory(first, table["item"].copy(), table["time"].copy(), actions)

    def last_time(self, data: bytes) -> int:
        """The time of the last record."""
        return int(np.frombuffer(data[-self.width :], dtype=self._type)["time"][0])


def refuse_going_back(user_last: int, history: StoredHistory) -> None:
    """Stored histories only grow forward in time: a late behaviour would change every prefix
    computed since.
    """
    if len(history.timestamps) and int(history.timestamps[0]) < user_last:
        sent = int(history.timestamps[0])
        raise AppendRefused(
            f"the first behaviour is from {sent}, but one from {user_last} is stored already; "
            "send them in order"
        )


def refuse_wrong_count(total: int, after: int | None) -> None:
    if after is not None and after != total:
        raise AppendRefused(
            f"{total} behaviours are stored, not {after}; this request may have been carried out "
            "before"
        )


def open_history_store(url: str, actions: tuple[str, ...], keep: int = KEEP) -> HistoryStore:
    """Open the store at `sqlite:PATH` or `redis://HOST:PORT/DB` for models with these actions."""
    if url.startswith("sqlite:"):
        from slipstream.history.sqlite_store import SqliteHistoryStore

        return SqliteHistoryStore(url.removeprefix("sqlite:"), Records(actions), keep)
    if url.startswith(("redis://", "rediss://", "unix://")):
        from slipstream.history.redis_store import RedisHistoryStore

        return RedisHistoryStore(url, Records(actions), keep)
    raise SlipstreamError(
        f"'{url}' names no history store; use sqlite:PATH or redis://HOST:PORT/DB"
    )


def refuse_other_actions(where: str, stored: str, records: Records) -> None:
    """Records have a fixed width: a store made for other actions cannot be read."""
    if stored != "\x1f".join(records.actions):
        names = ", ".join(stored.split("\x1f")) if stored else "none"
        raise SlipstreamError(
            f"history store {where} was made for actions {names}, this model has others; give "
            "another --history"
        )
