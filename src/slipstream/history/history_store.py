"""The history store: what each user did, so that a request may name a user and send no history.

Touch this when the record of a behaviour or the rules of appending change. A behaviour is a record
of fixed width (item, time, one float per action): appending adds bytes, reading the newest `n`
reads the last bytes. A behaviour keeps its number for ever; `first` is the number of the oldest one
still kept. There are two stores, opened by URL: `sqlite_store` (a file, many processes on one
machine) and `redis_store` (many machines).
"""

from typing import Protocol

import numpy as np

from slipstream.errors import SlipstreamError
from slipstream.history.user_history import History

KEEP = 65_536  # behaviours kept per user unless another number is given


class AppendError(Exception):
    """Behaviours that do not continue what is stored; the text gives the cause."""


class HistoryStore(Protocol):
    """What both stores offer. Every call is a coroutine that leaves the event loop free."""

    records: "Records"

    async def append(self, user: str, history: History, after: int | None = None) -> int:
        """Add behaviours, all or none, and return how many there are now.

        `AppendError` where time goes back, or where `after` is not the number stored.
        """

    async def read(self, user: str, limit: int, since: int | None = None) -> History | None:
        """Return the newest `limit` behaviours, or those from `since` on; None: unknown user."""

    async def close(self) -> None:
        """Close files and connections."""


class Records:
    """Behaviours as bytes: one record each, with the deployment's actions in a fixed order."""

    def __init__(self, actions: tuple[str, ...]) -> None:
        self.actions = actions
        self._type = np.dtype(
            [("item", "<i8"), ("time", "<i8"), *((f"a:{name}", "<f4") for name in actions)]
        )
        self.width = self._type.itemsize

    def pack(self, history: History) -> bytes:
        """Return a history's records; an absent action counts as 0, an unknown one is refused."""
        unknown = set(history.actions) - set(self.actions)
        if unknown:
            known = ", ".join(self.actions) or "none"
            raise AppendError(
                f"action '{min(unknown)}' is not one this model knows ({known}); leave it away"
            )
        table = np.zeros(len(history.items), dtype=self._type)
        table["item"], table["time"] = history.items, history.timestamps
        for name, values in history.actions.items():
            table[f"a:{name}"] = values
        return table.tobytes()

    def unpack(self, first: int, data: bytes) -> History:
        """Return the history of records, the oldest of which has the number `first`."""
        table = np.frombuffer(data, dtype=self._type)
        actions = {name: table[f"a:{name}"].copy() for name in self.actions}
        return History(table["item"].copy(), table["time"].copy(), actions, first=first)

    def last_time(self, data: bytes) -> int:
        """Return the time of the last record."""
        return int(np.frombuffer(data[-self.width :], dtype=self._type)["time"][0])


def refuse_going_back(user_last: int, history: History) -> None:
    """Refuse behaviours older than the last stored one: they would change every prefix since."""
    if len(history.timestamps) and int(history.timestamps[0]) < user_last:
        sent = int(history.timestamps[0])
        raise AppendError(
            f"the first behaviour is from {sent}, but one from {user_last} is stored already; "
            "send them in order"
        )


def refuse_wrong_count(total: int, after: int | None) -> None:
    """Refuse an append whose sender believes that another number is stored."""
    if after is not None and after != total:
        raise AppendError(
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
    """Refuse a store made for other actions: its records have another width."""
    if stored != "\x1f".join(records.actions):
        names = ", ".join(stored.split("\x1f")) if stored else "none"
        raise SlipstreamError(
            f"history store {where} was made for actions {names}, this model has others; give "
            "another --history"
        )
