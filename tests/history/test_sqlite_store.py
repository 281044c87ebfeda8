"""What only the SQLite store does: blocks in one file, a database or nothing.

What both stores do is in test_history_store.py.
"""

import asyncio
import sqlite3
import struct
import threading
from pathlib import Path

import pytest

from slipstream.history import sqlite_store
from slipstream.history.behaviour_blocks import CHUNK
from slipstream.history.history_store import HistoryStore, HistoryStoreError, open_history_store
from slipstream.history.sqlite_store import transaction
from slipstream.history.write_claim import WriteClaim
from tests.support.history_stores import behaviours, columns, run


def test_behaviours_lie_in_blocks_of_which_only_the_newest_grows(tmp_path: Path):
    path = tmp_path / "history.db"

    async def work(store: HistoryStore):
        await store.append("ann", behaviours(list(range(CHUNK - 1))))
        await store.append("ann", behaviours([CHUNK - 1, CHUNK]))

    run(f"sqlite:{path}", work)
    with sqlite3.connect(path) as connection:
        rows = connection.execute("SELECT first, count FROM blocks ORDER BY first")
        assert rows.fetchall() == [(0, CHUNK), (CHUNK, 1)]


def test_only_the_owner_may_read_the_files(tmp_path: Path):
    async def work(store: HistoryStore):
        await store.append("ann", behaviours([1]))
        return {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}

    modes = run(f"sqlite:{tmp_path / 'history.db'}", work)
    assert modes == dict.fromkeys(["history.db", "history.db-wal", "history.db-shm"], 0o600)


def write_earlier(path: Path, actions: str = "click\x1flike") -> None:
    """A file as the earlier format wrote it: 1,025 behaviours of ann, 1 of bob."""
    width = "<qq" + "f" * len(actions.split("\x1f"))
    records = [struct.pack(width, 2**62 + n, n, n % 2, 0) for n in range(100, CHUNK + 101)]
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT)")
        connection.execute(
            "CREATE TABLE chunks (user TEXT, first INTEGER, records BLOB, "
            "PRIMARY KEY (user, first)) WITHOUT ROWID"
        )
        connection.execute("INSERT INTO about VALUES ('actions', ?)", (actions,))
        for user, first, chunk in (
            ("ann", 2048, records[:CHUNK]),
            ("ann", 2048 + CHUNK, records[CHUNK:]),
            ("bob", 0, records[:1]),
            ("empty", 0, []),
        ):
            row = (user, first, b"".join(chunk))
            connection.execute("INSERT INTO chunks VALUES (?, ?, ?)", row)
    connection.close()


def test_a_file_of_the_earlier_format_is_migrated_when_it_is_opened(tmp_path: Path):
    write_earlier(tmp_path / "history.db")

    async def work(store: HistoryStore):
        migrated = await store.migrate()
        found = await store.read("ann", 10**6)
        total = await store.append("ann", behaviours([5], [5000], buy=[1]), after=found.total)
        return migrated, found, total, await store.users()

    url = f"sqlite:{tmp_path / 'history.db'}"
    migrated, found, total, users = run(url, work)
    assert (migrated, users, total) == (2, ["ann", "bob"], 2048 + CHUNK + 2)
    assert (found.first, found.total) == (2048, 2048 + CHUNK + 1)
    assert found.items.tolist() == [2**62 + n for n in range(100, CHUNK + 101)]
    assert found.timestamps.tolist() == list(range(100, CHUNK + 101))
    assert found.actions["click"].tolist() == [n % 2 for n in range(100, CHUNK + 101)]
    assert not found.actions["like"].any()
    assert run(url, lambda store: store.migrate()) == 0
    assert columns(run(url, lambda store: store.read("ann", 1))) == ([5], [5000], {"buy": [1]})


def test_a_migration_that_fails_leaves_the_earlier_file(tmp_path: Path, monkeypatch):
    write_earlier(tmp_path / "history.db")

    def fail(*_: object) -> None:
        raise OSError("no space")

    with monkeypatch.context() as patched:
        patched.setattr(sqlite_store, "encode_block", fail)
        with pytest.raises(HistoryStoreError, match="no space"):
            open_history_store(f"sqlite:{tmp_path / 'history.db'}")
    found = run(f"sqlite:{tmp_path / 'history.db'}", lambda store: store.read("ann", 10**6))
    assert len(found) == CHUNK + 1


def test_files_of_others_are_refused_and_left_alone(tmp_path: Path):
    (tmp_path / "file").write_text("not a database, but longer than a header would be" * 3)
    with pytest.raises(HistoryStoreError, match="no SQLite file"):
        open_history_store(f"sqlite:{tmp_path / 'file'}")
    with sqlite3.connect(tmp_path / "app.db") as connection:
        connection.execute("CREATE TABLE orders (id INTEGER)")
    with pytest.raises(HistoryStoreError, match="a database of another program"):
        open_history_store(f"sqlite:{tmp_path / 'app.db'}")
    tables = connection.execute("SELECT name FROM sqlite_master").fetchall()
    assert tables == [("orders",)]
    with pytest.raises(HistoryStoreError, match="does not answer"):
        open_history_store(f"sqlite:{tmp_path}")
    with pytest.raises(HistoryStoreError, match="there is no history store"):
        open_history_store(f"sqlite:{tmp_path / 'none.db'}", create=False)
    assert not (tmp_path / "none.db").exists()


def test_a_later_format_is_refused(tmp_path: Path):
    url = f"sqlite:{tmp_path / 'history.db'}"
    run(url, lambda store: store.append("ann", behaviours([1])))
    with sqlite3.connect(tmp_path / "history.db") as connection:
        connection.execute("UPDATE about SET value = '99'")
    with pytest.raises(HistoryStoreError, match="install a later slipstream"):
        open_history_store(url)


def spoil(store: HistoryStore, statement: str) -> None:
    """Run a statement on the writing connection, in its thread."""
    store._writer_thread.submit(lambda: store._writer.execute(statement)).result()


@pytest.mark.parametrize(
    ("spoiled", "mended", "says"),
    [
        ("PRAGMA query_only=1", "PRAGMA query_only=0", "make the file and its directory writable"),
        ("PRAGMA max_page_count=8", "PRAGMA max_page_count=99999", "free some space"),
    ],
)
def test_a_file_that_cannot_be_written_is_one_sentence_and_works_again(
    tmp_path: Path, spoiled: str, mended: str, says: str
):
    large = behaviours(list(range(5 * CHUNK)))

    async def work(store: HistoryStore):
        await store.append("ann", behaviours([1], [0]))
        spoil(store, spoiled)
        for call in (
            store.append("ann", large),
            store.append("bob", large),
            store.import_histories([("bob", large)]),
        ):
            with pytest.raises(HistoryStoreError, match=says):
                await call
        assert (await store.read("ann", 10)).items.tolist() == [1]
        assert await store.users() == ["ann"]
        spoil(store, mended)
        return await store.append("ann", large, after=1)

    assert run(f"sqlite:{tmp_path / 'history.db'}", work) == 1 + 5 * CHUNK


def test_a_locked_file_is_one_sentence_and_reads_do_not_wait(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(sqlite_store, "BUSY_SECONDS", 0.05)

    async def work(store: HistoryStore):
        await store.append("ann", behaviours([1]))
        other = sqlite3.connect(tmp_path / "history.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(HistoryStoreError, match="another process holds it; try again"):
            await store.append("ann", behaviours([2]))
        assert (await store.read("ann", 10)).items.tolist() == [1]
        other.execute("ROLLBACK")
        other.close()
        return await store.append("ann", behaviours([2]), after=1)

    assert run(f"sqlite:{tmp_path / 'history.db'}", work) == 2


def test_a_read_is_answered_while_an_append_is_under_way(tmp_path: Path):
    async def work(store: HistoryStore):
        await store.append("ann", behaviours([1]))
        busy = threading.Event()
        store._writer_thread.submit(busy.wait)
        append = asyncio.ensure_future(store.append("ann", behaviours([2])))
        found = await asyncio.wait_for(store.read("ann", 10), 30)
        assert found.items.tolist() == [1] and not append.done()
        busy.set()
        assert await append == 2

    run(f"sqlite:{tmp_path / 'history.db'}", work)


def test_a_file_that_was_removed_or_replaced_is_noticed(tmp_path: Path):
    path = tmp_path / "history.db"

    async def work(store: HistoryStore):
        await store.append("ann", behaviours([1]))
        path.rename(tmp_path / "moved.db")
        for call in (store.append("ann", behaviours([2])), store.read("ann", 1), store.check()):
            with pytest.raises(HistoryStoreError, match="removed or replaced"):
                await call
        (tmp_path / "moved.db").rename(path)
        return await store.append("ann", behaviours([2]), after=1)

    assert run(f"sqlite:{path}", work) == 2


def test_a_transaction_ends_even_where_a_rollback_is_impossible():
    connection = sqlite3.connect(":memory:", isolation_level=None)
    with pytest.raises(ValueError, match="mine"), transaction(connection):
        connection.execute("ROLLBACK")  # as SQLite does by itself when a disk is full
        raise ValueError("mine")
    assert not connection.in_transaction


def test_a_new_file_is_opened_while_another_process_begins_to_write_it(tmp_path):
    """SQLite refuses the switch to WAL at once then, however long its own time-out is."""
    path = tmp_path / "history.db"
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    released = threading.Timer(0.2, lambda: other.execute("ROLLBACK"))
    released.start()
    store = sqlite_store.SqliteHistoryStore(path, keep=100)
    released.join()
    other.close()
    asyncio.run(store.check())
    asyncio.run(store.close())
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


@pytest.mark.parametrize("way", ["its time is up", "its caller has gone"])
def test_an_append_that_was_given_up_is_not_stored_later(tmp_path: Path, way: str):
    async def work(store: HistoryStore):
        await store.append("ann", behaviours([1]))
        other = sqlite3.connect(tmp_path / "history.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        if way == "its time is up":
            with pytest.raises(HistoryStoreError, match="no answer within") as refused:
                await store.append("ann", behaviours([2]), seconds=0.1)
            assert refused.value.temporary
        else:
            task = asyncio.create_task(store.append("ann", behaviours([2])))
            await asyncio.sleep(0.1)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
        other.execute("ROLLBACK")
        other.close()
        return await store.append("ann", behaviours([3]), after=1)  # after it, in the same thread

    url = f"sqlite:{tmp_path / 'history.db'}"
    assert run(url, work) == 2
    assert columns(run(url, lambda store: store.read("ann", 9)))[0] == [1, 3]


def test_an_append_whose_commit_has_begun_is_answered_though_its_time_is_up(tmp_path: Path):
    async def work(store: HistoryStore):
        await store.check()
        begun, go_on = threading.Event(), threading.Event()
        commit = WriteClaim.commit

        def slow_commit(claim: WriteClaim) -> None:
            commit(claim)
            begun.set()
            go_on.wait(30)

        WriteClaim.commit = slow_commit
        try:
            task = asyncio.create_task(store.append("ann", behaviours([1]), seconds=0.05))
            await asyncio.to_thread(begun.wait, 30)
            await asyncio.sleep(0.1)
            assert not task.done()
            go_on.set()
            return await task
        finally:
            WriteClaim.commit = commit

    assert run(f"sqlite:{tmp_path / 'history.db'}", work) == 1


def test_a_patient_store_opens_once_its_file_can_be_opened(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(sqlite_store, "BUSY_SECONDS", 0.05)
    path = tmp_path / "history.db"
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")

    async def work():
        store = open_history_store(f"sqlite:{path}", patient=True)
        for call in (store.append("ann", behaviours([1])), store.read("ann", 1), store.check()):
            with pytest.raises(HistoryStoreError, match="try again") as refused:
                await call
            assert refused.value.temporary
        other.execute("ROLLBACK")
        assert await store.append("ann", behaviours([1])) == 1
        await store.close()

    asyncio.run(work())
    other.close()


def test_calls_that_wait_are_bounded(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(sqlite_store, "MAX_WAITING", 2)

    async def work(store: HistoryStore):
        busy = threading.Event()
        store._writer_thread.submit(busy.wait)
        waiting = [asyncio.ensure_future(store.append("ann", behaviours([n]))) for n in (1, 2)]
        await asyncio.sleep(0)
        with pytest.raises(HistoryStoreError, match="2 calls wait"):
            await store.append("ann", behaviours([3]))
        busy.set()
        await asyncio.gather(*waiting)
        return await store.append("ann", behaviours([3]), after=2)

    assert run(f"sqlite:{tmp_path / 'history.db'}", work) == 3
