"""What only the SQLite store does: chunks in one file, whole after a kill, a database or nothing.

What both stores do is in test_history_store.py.
"""

import asyncio
import multiprocessing
import os
import signal
import sqlite3
from pathlib import Path

import pytest

from slipstream.errors import SlipstreamError
from slipstream.history.history_store import HistoryStore, open_history_store
from slipstream.history.sqlite_store import CHUNK
from tests.support.history_stores import behaviours, run


def test_records_lie_in_chunks_of_which_only_the_newest_grows(tmp_path: Path):
    path = tmp_path / "history.db"

    async def work(store: HistoryStore):
        await store.append("ann", behaviours(list(range(CHUNK - 1))))
        await store.append("ann", behaviours([CHUNK - 1, CHUNK]))

    run(f"sqlite:{path}", work, actions=())
    with sqlite3.connect(path) as connection:
        rows = connection.execute("SELECT first, length(records) FROM chunks ORDER BY first")
        assert rows.fetchall() == [(0, 16 * CHUNK), (CHUNK, 16)]


def test_a_file_that_is_no_database_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("not a database, but longer than a header would be" * 3)
    with pytest.raises(SlipstreamError, match="cannot be opened"):
        open_history_store(f"sqlite:{tmp_path / 'file'}", ())


def _append_until_killed(url: str, started: "multiprocessing.synchronize.Event") -> None:
    async def work() -> None:
        store = open_history_store(url, ())
        for number in range(10**6):
            await store.append("ann", behaviours([number] * 10, [number] * 10))
            if number == 20:
                started.set()

    asyncio.run(work())


@pytest.mark.system
def test_a_killed_writer_leaves_whole_appends(tmp_path: Path):
    url = f"sqlite:{tmp_path / 'history.db'}"
    context = multiprocessing.get_context("spawn")
    started = context.Event()
    process = context.Process(target=_append_until_killed, args=(url, started), daemon=True)
    process.start()
    assert started.wait(30)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(10)
    found = run(url, lambda store: store.read("ann", 10**6), actions=())
    assert len(found.items) >= 210
    assert found.items.tolist() == [
        number for number in range(len(found.items) // 10) for _ in range(10)
    ]
