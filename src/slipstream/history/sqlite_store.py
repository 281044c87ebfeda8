"""Histories in one SQLite file (WAL): the default, shared by all instances of a machine.

Touch this when the tables of the file or its transactions change. A killed writer leaves whole
appends only. All statements run on one thread of the store, so the event loop never waits for the
disk.

    chunks(user, first, records)    blocks of at most CHUNK records; only the newest block grows
    about(name, value)              the actions this file was made for
"""

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from slipstream.errors import SlipstreamError
from slipstream.history.history_store import (
    Records,
    refuse_going_back,
    refuse_other_actions,
    refuse_wrong_count,
)
from slipstream.history.user_history import History

CHUNK = 1_024
BUSY_SECONDS = 10.0
Answer = TypeVar("Answer")


class SqliteHistoryStore:
    """A history store in a file."""

    def __init__(self, path: str | Path, records: Records, keep: int) -> None:
        self.records, self._keep, self._path = records, keep, Path(path)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="history")
        self._connection: sqlite3.Connection = self._thread.submit(self._open).result()

    def _open(self) -> sqlite3.Connection:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(self._path, timeout=BUSY_SECONDS, isolation_level=None)
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(
                "CREATE TABLE IF NOT EXISTS about (name TEXT PRIMARY KEY, value TEXT)"
            )
            connection.execute(
                "CREATE TABLE IF NOT EXISTS chunks "
                "(user TEXT, first INTEGER, records BLOB, PRIMARY KEY (user, first)) WITHOUT ROWID"
            )
            mine = "\x1f".join(self.records.actions)
            connection.execute("INSERT OR IGNORE INTO about VALUES ('actions', ?)", (mine,))
            stored = connection.execute(
                "SELECT value FROM about WHERE name = 'actions'"
            ).fetchone()[0]
            connection.execute("COMMIT")
        except (sqlite3.Error, OSError) as error:
            raise SlipstreamError(
                f"the history store {self._path} cannot be opened ({error}); give another --history"
            ) from error
        refuse_other_actions(str(self._path), stored, self.records)
        return connection

    async def append(self, user: str, history: History, after: int | None = None) -> int:
        """Add behaviours; see `HistoryStore.append`."""
        data = self.records.pack(history)
        return await self._run(lambda: self._append(user, history, data, after))

    async def read(self, user: str, limit: int, since: int | None = None) -> History | None:
        """Return the newest behaviours; see `HistoryStore.read`."""
        return await self._run(lambda: self._read(user, limit, since))

    async def close(self) -> None:
        """Close the file and end the store's thread."""
        await self._run(self._connection.close)
        self._thread.shutdown()

    async def _run(self, work: Callable[[], Answer]) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _append(self, user: str, history: History, data: bytes, after: int | None) -> int:
        connection, width = self._connection, self.records.width
        connection.execute("BEGIN IMMEDIATE")
        try:
            row = connection.execute(
                "SELECT first, records FROM chunks WHERE user = ? ORDER BY first DESC LIMIT 1",
                (user,),
            ).fetchone()
            first, newest = row if row is not None else (0, b"")
            total = first + len(newest) // width
            refuse_wrong_count(total, after)
            if newest:
                refuse_going_back(self.records.last_time(newest), history)
            room = max(0, CHUNK * width - len(newest))
            newest, rest = newest + data[:room], data[room:]
            connection.execute(
                "INSERT OR REPLACE INTO chunks VALUES (?, ?, ?)", (user, first, newest)
            )
            while rest:
                first += CHUNK
                connection.execute(
                    "INSERT INTO chunks VALUES (?, ?, ?)", (user, first, rest[: CHUNK * width])
                )
                rest = rest[CHUNK * width :]
            total += len(data) // width
            connection.execute(
                "DELETE FROM chunks WHERE user = ? AND first + ? <= ?",
                (user, CHUNK, total - self._keep),
            )
            connection.execute("COMMIT")
            return total
        except BaseException:
            connection.execute("ROLLBACK")
            raise

    def _read(self, user: str, limit: int, since: int | None) -> History | None:
        width = self.records.width
        last = self._connection.execute(
            "SELECT max(first) FROM chunks WHERE user = ?", (user,)
        ).fetchone()[0]
        if last is None:
            return None
        # The newest chunk may hold one record only, so count from where it begins.
        oldest = since if since is not None else last - limit
        rows = self._connection.execute(
            "SELECT first, records FROM chunks WHERE user = ? AND first > ? ORDER BY first",
            (user, oldest - CHUNK),
        ).fetchall()
        data, first = b"".join(records for _, records in rows), rows[0][0]
        total = first + len(data) // width
        begin = max(first, since if since is not None else total - limit)
        return self.records.unpack(begin, data[(begin - first) * width :])
