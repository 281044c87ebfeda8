"""The history stores: append only, whole, exact to the last bit of an id, alike in both stores."""

import asyncio
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from slipstream.errors import SlipstreamError
from slipstream.history.history_store import (
    AppendError,
    HistoryStore,
    Records,
    open_history_store,
)
from tests.support.history_stores import behaviours, run
from tests.support.serving_fixtures import wait_until

INT64_MAX = 2**63 - 1


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


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
        wait_until(lambda: answers(port), 30)
        yield port
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.system)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:{tmp_path / 'history.db'}"
    port = request.getfixturevalue("redis_port")
    redis.Redis(port=port).flushall()
    return f"redis://127.0.0.1:{port}/0"


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
        with pytest.raises(AppendError, match=f"{2**40} is stored already"):
            await store.append("ann", behaviours([3], [2**40 - 1]))
        assert await store.append("ann", behaviours([3], [2**40]), after=2) == 3
        with pytest.raises(AppendError, match="3 behaviours are stored, not 2"):
            await store.append("ann", behaviours([3], [2**40]), after=2)
        with pytest.raises(AppendError, match="'share' is not one this model knows"):
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


def test_urls_that_name_no_store_are_explained():
    with pytest.raises(SlipstreamError, match="names no history store"):
        open_history_store("mysql://x", ())


def test_records_are_packed_in_the_order_of_the_stores_actions():
    records = Records(("click", "like"))
    data = records.pack(behaviours([7, 8], [1, 2], like=[0.5, 1.0]))
    assert len(data) == 2 * records.width == 2 * (8 + 8 + 4 + 4)
    found = records.unpack(40, data)
    assert (found.first, found.total, found.items.tolist()) == (40, 42, [7, 8])
    assert found.actions["click"].tolist() == [0, 0] and found.actions["like"].tolist() == [0.5, 1]
    assert records.last_time(data) == 2
