"""Histories in one SQLite file (WAL): the default, shared by all instances of a machine.

Touch this when the tables of the file or its transactions change. A killed writer leaves whole
appends only. One thread writes and another reads, each with its own connection, so a read waits
neither for an append nor on the event loop. What is given up by its caller before it is committed
is rolled back. A file of the earlier format is migrated when it is opened, in one transaction.

    blocks(user, first, count, block)   blocks of at most CHUNK behaviours; only the newest grows
    about(name, value)                  the format of the file
"""

import asyncio
import contextlib
import dataclasses
import errno
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from slipstream.history.append_rules import (
    check_histories,
    check_history,
    check_user,
    id_kind,
    is_user,
    refuse_going_back,
    refuse_many_actions,
    refuse_other_kind,
    refuse_wrong_count,
)
from slipstream.history.behaviour_blocks import (
    CHUNK,
    RecentBlocks,
    cut_blocks,
    decode_block,
    encode_block,
    names_of,
)
from slipstream.history.earlier_format import read_records
from slipstream.history.history_store import HistoryStoreError
from slipstream.history.user_history import History, join_histories
from slipstream.history.write_claim import WriteClaim

FORMAT = "2"
BUSY_SECONDS = 10.0
COMMIT_SECONDS = 5.0  # for the end of a commit that has begun when its caller's time is up
MAX_WAITING = 1_024  # calls at a time; beyond it they are refused
Answer = TypeVar("Answer")

TABLES = (
    "CREATE TABLE IF NOT EXISTS about (name TEXT PRIMARY KEY, value TEXT)",
    "CREATE TABLE IF NOT EXISTS blocks (user TEXT NOT NULL, first INTEGER NOT NULL, "
    "count INTEGER NOT NULL, block BLOB NOT NULL, UNIQUE (user, first))",
)
NEWEST = "SELECT first, count, block FROM blocks WHERE user = ? ORDER BY first DESC LIMIT 1"
WRITE = (
    "INSERT INTO blocks (user, first, count, block) VALUES (?, ?, ?, ?) ON CONFLICT (user, first) "
    "DO UPDATE SET count = excluded.count, block = excluded.block"
)
TRIM = "DELETE FROM blocks WHERE user = ? AND first + count <= ?"
# One statement, so one snapshot. The newest block holds one behaviour at least, so count from where
# it begins, and always read it: it tells how many there are.
READ = """
SELECT first, count, block FROM blocks
WHERE user = :user AND first >= (
    SELECT min(max(first), coalesce(:since, max(first) - :limit) - :chunk + 1)
    FROM blocks WHERE user = :user)
ORDER BY first
"""
USERS = """
WITH RECURSIVE page (user) AS (
    SELECT min(user) FROM blocks WHERE user > :after
    UNION ALL
    SELECT (SELECT min(blocks.user) FROM blocks WHERE blocks.user > page.user)
    FROM page WHERE page.user IS NOT NULL LIMIT :limit)
SELECT user FROM page WHERE user IS NOT NULL
"""
TEMPORARY = ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_READONLY", "SQLITE_FULL", "SQLITE_IOERR")
HINTS = {  # by the beginning of SQLite's name for an error
    "SQLITE_BUSY": "another process holds it; try again",
    "SQLITE_LOCKED": "another process holds it; try again",
    "SQLITE_READONLY": "make the file and its directory writable",
    "SQLITE_FULL": "free some space on its disk",
    "SQLITE_NOTADB": "it is no SQLite file; give another --history",
    "SQLITE_CORRUPT": "it is damaged; restore it or give another --history",
    "SQLITE_CANTOPEN": "check that the path exists and may be opened",
}


class SqliteHistoryStore:
    """A history store in a file."""

    def __init__(
        self, path: str | Path, keep: int, create: bool = True, patient: bool = False
    ) -> None:
        self._keep, self._path, self._create = keep, Path(path), create
        self._recent = RecentBlocks()  # of the reading thread
        self._migrated = 0
        self._waiting = 0
        self._writer_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="history")
        self._reader_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="history-read")
        self._opening = threading.Lock()
        self._connections: tuple[sqlite3.Connection, sqlite3.Connection] | None = None
        try:
            if not patient:
                self._writer_thread.submit(self._answer, self._open).result()
        except BaseException:
            self._writer_thread.shutdown()
            self._reader_thread.shutdown()
            raise

    @property
    def _writer(self) -> sqlite3.Connection:
        return self._open()[0]

    @property
    def _reader(self) -> sqlite3.Connection:
        return self._open()[1]

    async def append(
        self,
        user: str,
        history: History,
        after: int | None = None,
        now: float | None = None,
        seconds: float | None = None,
    ) -> int:
        """Add behaviours; see `HistoryStore.append`."""
        check_user(user)
        checked = check_history(history, now)
        return await self._write(lambda: self._append(user, checked, after), seconds)

    async def read(
        self, user: str, limit: int, since: int | None = None, seconds: float | None = None
    ) -> History | None:
        """Return the newest behaviours; see `HistoryStore.read`."""
        if not is_user(user):
            return None
        return await self._run(lambda: self._read(user, limit, since), seconds)

    async def delete(self, user: str, seconds: float | None = None) -> int:
        """Forget a user; see `HistoryStore.delete`."""
        return await self._write(lambda: self._delete(user), seconds) if is_user(user) else 0

    async def users(self, after: str | None = None, limit: int = 1000) -> list[str]:
        """Return users in order; see `HistoryStore.users`."""
        if after:
            check_user(after)
        page = {"after": after or "", "limit": limit}
        return await self._run(lambda: [user for (user,) in self._reader.execute(USERS, page)])

    async def import_histories(
        self, histories: Sequence[tuple[str, History]], replace: bool = False
    ) -> list[str]:
        """Store whole histories in one transaction; see `HistoryStore.import_histories`."""
        checked = check_histories(histories)
        return await self._write(lambda: self._import(checked, replace))

    async def check(self) -> None:
        """Check that the file answers."""
        await self._run(lambda: self._reader.execute("SELECT 1 FROM about").fetchone())

    async def migrate(self) -> int:
        """Return how many users were migrated when this file was opened."""
        await self.check()
        return self._migrated

    async def close(self) -> None:
        """Close the file and end the store's threads."""
        loop = asyncio.get_running_loop()
        for place, thread in enumerate((self._writer_thread, self._reader_thread)):
            if self._connections is not None:
                await loop.run_in_executor(thread, self._connections[place].close)
            thread.shutdown()

    # ---- threads and errors ----------------------------------------------------------------------

    async def _write(self, work: Callable[[], Answer], seconds: float | None = None) -> Answer:
        claim = WriteClaim()

        def whole() -> Answer:
            claim.check()
            with transaction(self._writer):
                answer = work()
                claim.commit()
                return answer

        future = self._submit(self._writer_thread, whole)
        try:
            done, _ = await asyncio.wait([future], timeout=seconds)
            if not done and claim.withdraw():
                raise self._too_slow(seconds)
        except asyncio.CancelledError:
            if claim.withdraw():
                raise
            done = set()
        if not done:  # it is being committed: its answer is worth waiting for
            await asyncio.wait([future], timeout=COMMIT_SECONDS)
        if not future.done():
            raise HistoryStoreError(
                f"the history store {self._path} takes long to commit; whether it did is not "
                "known: read the user's history before you send it again",
                temporary=True,
            )
        return future.result()

    async def _run(self, work: Callable[[], Answer], seconds: float | None = None) -> Answer:
        try:
            async with asyncio.timeout(seconds):
                return await self._submit(self._reader_thread, work)
        except TimeoutError as error:
            raise self._too_slow(seconds) from error

    def _submit(
        self, thread: ThreadPoolExecutor, work: Callable[[], Answer]
    ) -> "asyncio.Future[Answer]":
        """Start some work in a thread; its failure is a `HistoryStoreError`."""

        def checked() -> Answer:
            if self._connections is not None and _file_identity(self._path) != self._identity:
                raise HistoryStoreError(
                    f"the history store {self._path} was removed or replaced while it was open; "
                    "put it back, or start again",
                    temporary=True,
                )
            return self._answer(work)

        if self._waiting >= MAX_WAITING:
            raise HistoryStoreError(
                f"{self._waiting} calls wait for the history store {self._path}; try again later",
                temporary=True,
            )
        future = asyncio.get_running_loop().run_in_executor(thread, checked)
        self._waiting += 1
        future.add_done_callback(self._note_end)
        return future

    def _note_end(self, future: "asyncio.Future[Any]") -> None:
        self._waiting -= 1
        if not future.cancelled():
            future.exception()  # of a call that was given up: nobody else asks for it

    def _too_slow(self, seconds: float | None) -> HistoryStoreError:
        return HistoryStoreError(
            f"the history store {self._path} gave no answer within {seconds:.2f} s; is another "
            "process writing to it, or its disk slow?",
            temporary=True,
        )

    def _answer(self, work: Callable[[], Answer]) -> Answer:
        """Do some work; a failure of SQLite or of the disk is a `HistoryStoreError`."""
        try:
            return work()
        except (sqlite3.Error, OSError) as error:
            name = getattr(error, "sqlite_errorname", "")
            hint = next(
                (hint for start, hint in HINTS.items() if name.startswith(start)),
                "check the file and its disk",
            )
            full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EIO)
            raise HistoryStoreError(
                f"the history store {self._path} does not answer ({error}); {hint}",
                temporary=full or name.startswith(TEMPORARY),
            ) from error

    # ---- opening ---------------------------------------------------------------------------------

    def _open(self) -> tuple[sqlite3.Connection, sqlite3.Connection]:
        """Return the connections that write and read, opened by the first call that needs one."""
        if self._connections is None:
            with self._opening:
                if self._connections is None:
                    writer = self._open_writer()
                    self._identity = _file_identity(self._path)
                    try:
                        self._connections = writer, self._open_reader()
                    except BaseException:
                        writer.close()
                        raise
        return self._connections

    def _open_writer(self) -> sqlite3.Connection:
        if not self._create and not self._path.is_file():
            raise HistoryStoreError(
                f"there is no history store {self._path}; give the --history that was served or "
                "imported into"
            )
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # SQLite gives the files beside it the permissions of this one.
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))
        connection = self._connect()
        try:
            _enter_wal(connection)
            connection.execute("PRAGMA synchronous=NORMAL")
            if not self._is_current(connection):
                with transaction(connection):
                    self._prepare_tables(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _open_reader(self) -> sqlite3.Connection:
        connection = self._connect()
        connection.execute("PRAGMA query_only=1")
        return connection

    def _connect(self) -> sqlite3.Connection:
        # Opened by one thread and used by another, by one at a time.
        return sqlite3.connect(
            self._path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )

    def _is_current(self, connection: sqlite3.Connection) -> bool:
        try:
            return _about(connection).get("format") == FORMAT
        except sqlite3.OperationalError:  # no such table
            return False

    def _prepare_tables(self, connection: sqlite3.Connection) -> None:
        """Create the tables, or bring those of the earlier format to this one."""
        tables = {
            name
            for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        }
        about = _about(connection) if "about" in tables else {}
        if about.get("format") == FORMAT:
            return  # another process was faster
        if "format" in about:
            raise HistoryStoreError(
                f"the history store {self._path} has format {about['format']}, which this version "
                "does not know; install a later slipstream"
            )
        if tables and "actions" not in about:
            raise HistoryStoreError(
                f"{self._path} is a database of another program; give another --history"
            )
        for statement in TABLES:
            connection.execute(statement)
        if "actions" in about:
            self._migrate_records(connection, about["actions"])
        connection.execute("INSERT INTO about VALUES ('format', ?)", (FORMAT,))

    def _migrate_records(self, connection: sqlite3.Connection, actions: str) -> None:
        """Rewrite the fixed-width records of the earlier format as blocks."""
        users = set()
        for user, first, data in connection.execute("SELECT user, first, records FROM chunks"):
            history = read_records(first, data, actions)
            if len(history):
                users.add(user)
                row = (user, first, len(history), encode_block(history))
                connection.execute(WRITE, row)
        connection.execute("DROP TABLE chunks")
        connection.execute("DELETE FROM about WHERE name = 'actions'")
        self._migrated = len(users)

    # ---- statements ------------------------------------------------------------------------------

    def _append(self, user: str, history: History, after: int | None) -> int:
        row = self._writer.execute(NEWEST, (user,)).fetchone()
        if row is None:
            refuse_wrong_count(0, after)
            parts = [dataclasses.replace(history, first=0)]
        else:
            first, count, data = row
            newest = decode_block(data, first)
            refuse_wrong_count(newest.total, after)
            refuse_other_kind(id_kind(newest.items), history)
            refuse_going_back(int(newest.timestamps[-1]), history)
            refuse_many_actions(len(names_of([newest, history])))
            later = dataclasses.replace(history, first=first + count)
            parts = [newest, later] if count < CHUNK else [later]
        if not len(history):
            return parts[-1].first
        grown = join_histories(parts)
        self._writer.executemany(WRITE, [(user, *block) for block in cut_blocks(grown)])
        self._writer.execute(TRIM, (user, grown.total - self._keep))
        return grown.total

    def _read(self, user: str, limit: int, since: int | None) -> History | None:
        wanted = {"user": user, "limit": limit, "since": since, "chunk": CHUNK}
        rows = self._reader.execute(READ, wanted).fetchall()
        if not rows:
            return None
        oldest, total = rows[0][0], rows[-1][0] + rows[-1][1]
        begin = since if since is not None else total - limit
        blocks = [(first, data) for first, _, data in rows]
        return self._recent.merge(user, blocks, min(max(oldest, begin), total), total)

    def _delete(self, user: str) -> int:
        counted = self._writer.execute("SELECT sum(count) FROM blocks WHERE user = ?", (user,))
        count = counted.fetchone()[0]
        self._writer.execute("DELETE FROM blocks WHERE user = ?", (user,))
        return count or 0

    def _import(self, histories: list[tuple[str, History]], replace: bool) -> list[str]:
        written = []
        for user, history in histories:
            if replace:
                self._writer.execute("DELETE FROM blocks WHERE user = ?", (user,))
            elif self._writer.execute(NEWEST, (user,)).fetchone() is not None:
                continue
            if len(history):
                self._writer.executemany(WRITE, [(user, *block) for block in cut_blocks(history)])
                self._writer.execute(TRIM, (user, history.total - self._keep))
                written.append(user)
        return written


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Run a block in one transaction: committed as a whole, or not at all."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # SQLite has rolled back by itself after some failures (a full disk).
        if connection.in_transaction:
            with contextlib.suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
        raise


def _about(connection: sqlite3.Connection) -> dict[str, str]:
    return dict(connection.execute("SELECT name, value FROM about").fetchall())


def _file_identity(path: Path) -> tuple[int, int] | None:
    """Return what tells a file from another one that took its name; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _enter_wal(connection: sqlite3.Connection) -> None:
    """Switch a file to WAL, also while other processes open the same new file.

    SQLite does not wait by itself where two connections switch at once: one of them is refused.
    """
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            refused = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
            if not refused or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
