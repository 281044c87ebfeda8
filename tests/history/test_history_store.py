"""The history stores: append only, whole, exact to the last bit of an id, alike in SQLite and
Redis.
"""

import asyncio
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from slipstream.errors import SlipstreamError
from slipstream.history.history_store import HistoryStore, StoredHistory, open_history_store
from slipstream.serving.http.messages import AppendRefused

INT64_MAX = 2**63 - 1


def behaviours(
    items: list[int], timestamps: list[int] | None = None, **actions: list[float]
) -> StoredHistory:
    times = np.array(timestamps if timestamps is not None else items, dtype=np.int64)
    return StoredHistory(
        0,
        np.array(items, dtype=np.int64),
        times,
        {k: np.array(v, dtype=np.float32) for k, v in actions.items()},
    )


@pytest.fixture(scope="module")
def redis_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    server = shutil.which("redis-server")
    if server is None:
        pytest.skip("redis-server is not installed here (apt-get install redis-server)")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = tmp_path_factory.mktemp("redis")
    command = [
        server,
        "--port",
        str(port),
        "--bind",
        "127.0.0.1",
        "--save",
        "",
        "--dir",
        str(place),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.02)
        yield port
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture(params=["sqlite", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:{tmp_path / 'history.db'}"
    port = request.getfixturevalue("redis_port")
    subprocess.run(
        [sys.executable, "-c", f"import redis; redis.Redis(port={port}).flushall()"],
        check=True,
        timeout=20,
    )
    return f"redis://127.0.0.1:{port}/0"


def run(url: str, work, actions: tuple[str, ...] = ("click", "like"), keep: int = 65_536):
    async def whole():
        store = open_history_store(url, actions, keep)
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(whole())


def test_what_was_appended_is_read_back_exactly(url: str):
    async def work(store: HistoryStore):
        assert await store.read("ann", 10) is None
        assert (
            await store.append(
                "ann", behaviours([INT64_MAX, 2**53 + 1], [0, INT64_MAX - 1], click=[1.0, 0.25])
            )
            == 2
        )
        assert await store.append("ann", behaviours([7], [INT64_MAX], like=[1.0])) == 3
        assert await store.append("bob", behaviours([1], [1])) == 1
        return await store.read("ann", 10)

    found = run(url, work)
    assert found.items.tolist() == [INT64_MAX, 2**53 + 1, 7]
    assert found.timestamps.tolist() == [0, INT64_MAX - 1, INT64_MAX]
    assert {name: values.tolist() for name, values in found.actions.items()} == {
        "click": [1, 0.25, 0],
        "like": [0, 0, 1],
    }
    assert (found.first, found.total) == (0, 3)


def test_the_newest_and_those_from_a_number_on(url: str):
    async def work(store: HistoryStore):
        for begin in range(0, 5000, 700):
            await store.append("ann", behaviours(list(range(begin, min(begin + 700, 5000)))))
        newest, later, all_ = (
            await store.read("ann", 10),
            await store.read("ann", 10, since=4000),
            await store.read("ann", 10**6),
        )
        assert (newest.first, newest.items.tolist()) == (4990, list(range(4990, 5000)))
        assert (later.first, later.items.tolist()) == (4000, list(range(4000, 5000)))
        assert (all_.first, all_.items.tolist()) == (0, list(range(5000)))
        for limit in (0, 1, 1023, 1024, 1025, 4999, 5000, 5001):
            assert (await store.read("ann", limit)).items.tolist() == list(
                range(max(0, 5000 - limit), 5000)
            )
        assert all_.part(10, 12).items.tolist() == [10, 11]

    run(url, work)


def test_the_oldest_are_forgotten_and_numbers_stay(url: str):
    async def work(store: HistoryStore):
        for begin in range(0, 10_000, 500):
            assert (
                await store.append("ann", behaviours(list(range(begin, begin + 500))))
                == begin + 500
            )
        return await store.read("ann", 10**6)

    found = run(url, work, keep=2_000)
    assert found.total == 10_000
    assert 2_000 <= len(found.items) <= 2 * 2_000
    assert found.items.tolist() == list(range(found.first, 10_000))


def test_time_does_not_go_back_and_nothing_is_appended_twice(url: str):
    async def work(store: HistoryStore):
        await store.append("ann", behaviours([1, 2], [100, 2**40]))
        with pytest.raises(AppendRefused, match=f"{2**40} is stored already"):
            await store.append("ann", behaviours([3], [2**40 - 1]))
        assert await store.append("ann", behaviours([3], [2**40]), after=2) == 3
        with pytest.raises(AppendRefused, match="3 behaviours are stored, not 2"):
            await store.append("ann", behaviours([3], [2**40]), after=2)
        with pytest.raises(AppendRefused, match="'share' is not one this model knows"):
            await store.append("ann", behaviours([4], [2**41], share=[1.0]))
        return (await store.read("ann", 10)).items.tolist()

    assert run(url, work) == [1, 2, 3]


def test_concurrent_appends_lose_nothing(url: str):
    async def work(store: HistoryStore):
        other = open_history_store(url, ("click", "like"))
        stores = [store, other]
        totals = await asyncio.gather(
            *(stores[n % 2].append("ann", behaviours([n], [5])) for n in range(100))
        )
        await other.close()
        assert sorted(totals) == list(range(1, 101))
        return sorted((await store.read("ann", 1000)).items.tolist())

    assert run(url, work) == list(range(100))


def test_a_store_of_other_actions_is_refused(url: str):
    async def append(store: HistoryStore):
        await store.append("ann", behaviours([1]))

    run(url, append)
    with pytest.raises(SlipstreamError, match="made for actions click, like"):
        run(url, append, actions=("rating",))


def _append_until_killed(url: str, started: "multiprocessing.synchronize.Event") -> None:
    async def work() -> None:
        store = open_history_store(url, ())
        for number in range(10**6):
            await store.append("ann", behaviours([number] * 10, [number] * 10))
            if number == 20:
                started.set()

    asyncio.run(work())


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


def test_urls_that_name_no_store_are_explained(tmp_path: Path):
    with pytest.raises(SlipstreamError, match="names no history store"):
        open_history_store("mysql://x", ())
    (tmp_path / "file").write_text(
        "not a database, but longer than a header of one hundred bytes would be" * 3
    )
    with pytest.raises(SlipstreamError, match="cannot be opened"):
        open_history_store(f"sqlite:{tmp_path / 'file'}", ())


def test_a_redis_that_is_not_there_is_named_without_its_password():
    async def work(store: HistoryStore):
        await store.read("ann", 1)

    with pytest.raises(SlipstreamError, match="does not answer") as refused:
        run("redis://user:geheim@127.0.0.1:1/0", work)
    assert "geheim" not in str(refused.value)
