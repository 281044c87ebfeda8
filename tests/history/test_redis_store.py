"""What only the Redis store does; what both stores do is in test_history_store.py."""

import asyncio
import contextlib
import os
import signal
import struct
from pathlib import Path

import pytest
import redis

from slipstream.history.history_store import HistoryStore, HistoryStoreError, open_history_store
from slipstream.history.redis_store import CONNECTIONS, TAIL, RedisHistoryStore
from tests.support.history_stores import behaviours, columns, run
from tests.support.redis_server import free_port, redis_server


def test_a_redis_that_is_not_there_is_named_without_its_password():
    for work in (
        lambda store: store.read("ann", 1),
        lambda store: store.append("ann", behaviours([1])),
        lambda store: store.delete("ann"),
        lambda store: store.users(),
        lambda store: store.import_histories([("ann", behaviours([1]))]),
        lambda store: store.check(),
        lambda store: store.migrate(),
    ):
        with pytest.raises(HistoryStoreError, match="does not answer") as refused:
            run("redis://user:geheim@127.0.0.1:1/0", work)
        assert "geheim" not in str(refused.value)


def test_an_address_that_is_none_is_refused():
    with pytest.raises(HistoryStoreError, match="no address"):
        open_history_store("redis://host:port/0")


@pytest.mark.system
def test_small_blocks_are_packed_while_others_append(redis_url: str):
    async def work(store: HistoryStore):
        async def append(start: int) -> None:
            for number in range(200):
                await store.append("ann", behaviours([start + number], [5]))

        await asyncio.gather(*(append(1000 * writer) for writer in range(4)))
        return await store.read("ann", 10**6)

    found = run(redis_url, work)
    expected = [1000 * writer + number for writer in range(4) for number in range(200)]
    assert sorted(found.items.tolist()) == expected
    for writer in range(4):
        own = [item for item in found.items.tolist() if item // 1000 == writer]
        assert own == sorted(own)
    # 800 appends, each with a block of its own, were packed on the way.
    blocks = redis.Redis.from_url(redis_url).zcard("slipstream:blocks:ann")
    assert blocks < 10 * TAIL


@pytest.mark.system
def test_a_packing_that_comes_after_another_one_changes_nothing(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
):
    """The slow client read fewer blocks than the fast one packed; both began at behaviour 0."""

    async def work(slow: RedisHistoryStore):
        fast = open_history_store(redis_url)
        pack = slow._pack

        async def pack_after_the_other(**call):
            for number in range(TAIL, 2 * TAIL):
                await fast.append("ann", behaviours([number], [5]))
            packed.append(await pack(**call))

        packed: list[int] = []
        monkeypatch.setattr(slow, "_pack", pack_after_the_other)
        for number in range(TAIL):
            await slow.append("ann", behaviours([number], [5]))
        await fast.close()
        assert packed == [0]
        return await slow.read("ann", 10**6)

    assert run(redis_url, work).items.tolist() == list(range(2 * TAIL))


@pytest.mark.system
def test_packing_leaves_few_blocks(redis_url: str):
    async def work(store: HistoryStore):
        for number in range(1100):
            await store.append("ann", behaviours([number]))

    run(redis_url, work)
    blocks = redis.Redis.from_url(redis_url).zrange("slipstream:blocks:ann", 0, -1)
    assert len(blocks) <= 2 + TAIL
    assert all(b":" in block for block in blocks)


@pytest.mark.system
def test_packing_begins_behind_what_was_forgotten(redis_url: str):
    async def work(store: HistoryStore):
        for number in range(TAIL):
            await store.append("ann", behaviours([number]))
        return await store.read("ann", 100)

    found = run(redis_url, work, keep=10)
    assert found.items.tolist() == list(range(TAIL - 10, TAIL))
    blocks = redis.Redis.from_url(redis_url).zrange("slipstream:blocks:ann", 0, -1, withscores=True)
    assert [score for _, score in blocks] == [TAIL - 10]


@pytest.mark.system
def test_a_packing_that_comes_too_late_changes_nothing(redis_url: str):
    async def work(store: RedisHistoryStore):
        for number in range(TAIL - 1):
            await store.append("ann", behaviours([number]))
        keys = store._keys("ann")[:2]
        born, packed, total, *_ = await store._tail(keys=keys)
        stale = [born, packed, total, total, 0, b"not a block"]
        await store.delete("ann")
        await store.append("ann", behaviours([7, 8]))  # a new user of the same name
        assert await store._pack(keys=keys, args=stale) == 0
        return await store.read("ann", 100)

    assert columns(run(redis_url, work)) == ([7, 8], [7, 8], {})


@pytest.mark.system
def test_more_calls_at_once_than_connections(redis_url: str):
    async def work(store: HistoryStore):
        await asyncio.gather(
            *(store.append(f"u{n}", behaviours([n])) for n in range(10 * CONNECTIONS))
        )
        return len(await store.users())

    assert run(redis_url, work) == 10 * CONNECTIONS


@pytest.mark.system
def test_the_earlier_format_is_refused_with_the_command_that_migrates_it(redis_url: str):
    client = redis.Redis.from_url(redis_url)
    client.set("slipstream:actions", "click")
    for user in ("ann", "a}b/ü"):
        client.set(f"slipstream:h:{{{user}}}", struct.pack("<qqf", 2**62, 50, 1))
        client.append(f"slipstream:h:{{{user}}}", struct.pack("<qqf", 7, 60, 0))
    client.set("slipstream:f:{ann}", 40)
    with pytest.raises(
        HistoryStoreError, match=f"slipstream history migrate --history {redis_url}"
    ):
        run(redis_url, lambda store: store.read("ann", 10))

    async def work(store: HistoryStore):
        assert await store.migrate() == 2
        assert await store.migrate() == 0
        assert await store.append("ann", behaviours([9], [61], like=[1]), after=42) == 43
        return await store.read("ann", 10), await store.read("a}b/ü", 10)

    ann, other = run(redis_url, work)
    assert columns(ann) == ([2**62, 7, 9], [50, 60, 61], {"click": [1, 0, 0], "like": [0, 0, 1]})
    assert (ann.first, other.first, other.items.tolist()) == (40, 0, [2**62, 7])
    assert not client.keys("slipstream:[hf]:*") and not client.exists("slipstream:actions")


@pytest.mark.system
def test_a_later_format_is_refused(redis_url: str):
    redis.Redis.from_url(redis_url).set("slipstream:format", "99")
    with pytest.raises(HistoryStoreError, match="install a later slipstream"):
        run(redis_url, lambda store: store.check())


@pytest.mark.system
def test_a_server_that_is_full_or_gone_is_one_sentence_and_works_again_later(tmp_path: Path):
    port = free_port()

    async def work(store: HistoryStore):
        with redis_server(tmp_path, port, "--maxmemory-policy", "noeviction"):
            await store.append("ann", behaviours([1]))
            client = redis.Redis(port=port)
            client.config_set("maxmemory", "1")
            with pytest.raises(HistoryStoreError, match=r"maxmemory|OOM"):
                await store.append("ann", behaviours([2]))
            client.config_set("maxmemory", "0")
            assert await store.append("ann", behaviours([2]), after=1) == 2
        for call in (store.read("ann", 1), store.append("ann", behaviours([3])), store.check()):
            with pytest.raises(HistoryStoreError, match="does not answer"):
                await call
        with redis_server(tmp_path, port):
            assert await store.append("ann", behaviours([1])) == 1

    run(f"redis://127.0.0.1:{port}/0", work)


@pytest.mark.system
def test_an_append_that_redis_comes_to_too_late_is_not_stored(redis_url: str):
    """A server that hangs finds the append in its socket when it goes on."""
    pid = redis.Redis.from_url(redis_url).info("server")["process_id"]

    async def work(store: HistoryStore):
        await store.append("ann", behaviours([1]))
        os.kill(pid, signal.SIGSTOP)
        try:
            for call in (
                store.append("ann", behaviours([2]), seconds=0.3),
                store.read("ann", 1, seconds=0.1),
                store.delete("bob", seconds=0.1),
            ):
                with pytest.raises(HistoryStoreError, match="does not answer") as refused:
                    await call
                assert refused.value.temporary
        finally:
            os.kill(pid, signal.SIGCONT)
        return await store.append("ann", behaviours([3]), after=1)

    assert run(redis_url, work) == 2
    assert columns(run(redis_url, lambda store: store.read("ann", 9)))[0] == [1, 3]


@pytest.mark.system
def test_a_redis_that_was_restarted_is_read_at_once(tmp_path: Path):
    """Several connections are open; none of those of the ended server costs a read."""
    port, kept = free_port(), ("--appendonly", "yes", "--appendfsync", "always")

    async def work(store: HistoryStore):
        await asyncio.gather(*(store.append(user, behaviours([1])) for user in "abcdefgh"))
        server.close()
        server.enter_context(redis_server(tmp_path, port, *kept))
        found = await asyncio.gather(*(store.read(user, 9) for user in "abcdefgh"))
        return [history.items.tolist() for history in found]

    with contextlib.ExitStack() as server:
        server.enter_context(redis_server(tmp_path, port, *kept))
        assert run(f"redis://127.0.0.1:{port}/0", work) == [[1]] * 8


@pytest.mark.system
def test_after_one_failure_no_connection_of_the_ended_server_is_left(tmp_path: Path):
    port, kept = free_port(), ("--appendonly", "yes", "--appendfsync", "always")

    async def work(store: HistoryStore):
        await asyncio.gather(*(store.append(user, behaviours([1])) for user in "abcdefgh"))
        server.close()
        with pytest.raises(HistoryStoreError, match="does not answer"):
            await store.append("a", behaviours([2]))
        server.enter_context(redis_server(tmp_path, port, *kept))
        return await asyncio.gather(*(store.append(user, behaviours([3])) for user in "abcdefgh"))

    with contextlib.ExitStack() as server:
        server.enter_context(redis_server(tmp_path, port, *kept))
        assert run(f"redis://127.0.0.1:{port}/0", work) == [2] * 8


@pytest.mark.system
def test_a_clock_of_redis_that_was_put_forward_refuses_no_append(redis_url: str):
    async def work(store: RedisHistoryStore):
        await store.append("ann", behaviours([1]))
        store._clock_ahead -= 3600  # as if Redis' clock had been put an hour forward since
        return await store.append("ann", behaviours([2]))

    assert run(redis_url, work) == 2
