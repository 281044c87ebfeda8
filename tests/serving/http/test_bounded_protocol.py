"""One connection is bounded: its head, its times, its pipeline, what it leaves unread."""

import asyncio
import contextlib
import gc
import tracemalloc

import pytest

from slipstream.serving.http import bounded_protocol
from tests.support.http_connections import bounded_server, read_all, run, until

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
LAST = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
KIB = 1024


def test_requests_one_after_the_other_are_answered():
    async def work() -> None:
        async with bounded_server() as server:
            body = b"b" * 100_000
            long = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n" + body
            chunks = b"".join(b"400\r\n" + b"c" * KIB + b"\r\n" for _ in range(100))
            answers = await server.ask(GET, long, CHUNKED + chunks + b"0\r\n\r\n", GET + LAST)
            assert answers.count(b"HTTP/1.1 200 OK") == 5
            assert b"size 100000" in answers and b"size 102400" in answers
            await until(lambda: server.table.open == 0)

    run(work)


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([b"GET / HTTP/1.1\r\nx: ", *[b"a" * 16 * KIB] * 64], b"431"),
        ([b"GET /", *[b"a" * 16 * KIB] * 64], b"431"),
        ([b"GET / HTTP/1.1\r\nx: " + b"a" * 40_000 + b"\r\n\r\n"], b"431"),
        ([b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 129 + b"\r\n"], b"431"),
        ([CHUNKED, b"0\r\nx: ", *[b"t" * 16 * KIB] * 64], b""),
        ([CHUNKED, b"1;", *[b"e" * 16 * KIB] * 64], b""),
        ([b"\x00\x01\x02 nonsense\r\n\r\n"], b"400"),
        ([b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"], b""),
        ([b"POST / HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n"], b"400"),
    ],
    ids=["header", "url", "one-read", "many", "trailer", "chunk-mark", "nonsense", "h2c", "both"],
)
def test_a_head_above_its_bounds_is_refused_and_the_connection_ends(
    parts: list[bytes], reason: bytes
):
    async def work() -> None:
        async with bounded_server() as server:
            answer = await server.ask(*parts)
            assert answer.startswith(b"HTTP/1.1 " + reason) if reason else b" 200 " not in answer
            await until(lambda: server.table.open == 0)
            assert b"size 0" in await server.ask(LAST)

    run(work)


def test_a_giant_header_takes_no_memory():
    async def work() -> None:
        async with bounded_server() as server:
            await server.ask(LAST)
            gc.collect()
            tracemalloc.start()
            await server.ask(b"GET / HTTP/1.1\r\nx: ", *[b"a" * 256 * KIB] * 64)  # 16 MiB
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert peak < 4 * 2**20

    run(work)


def test_pipelined_requests_are_bounded():
    async def work() -> None:
        async with bounded_server(pipelined=4) as server:
            answers = await server.ask(GET * 4 + LAST)
            assert answers.count(b" 200 ") == 5
            flood = await server.ask(GET * 5_000)
            assert flood.count(b" 200 ") < 6
            await until(lambda: server.table.open == 0)

    run(work)


@pytest.mark.parametrize(
    "parts",
    [[], [b"G"], [b"GET / HTTP/1.1\r\nho"], [b"\r\n"] * 3, [GET + b"GET /"]],
    ids=["silent", "one-byte", "half-a-head", "line-breaks", "second"],
)
def test_a_head_that_does_not_arrive_in_time_ends_the_connection(parts: list[bytes]):
    async def work() -> None:
        async with bounded_server(head_seconds=0.1) as server:
            assert b" 408 " in await server.ask(*parts)
            assert server.table.counts["requests_late"] == 1
            await until(lambda: server.table.open == 0)

    run(work)


@pytest.mark.parametrize("slow", [b"GET / HTTP/1.1\r\nx-slow: " + b"a" * 10_000, b"\r" * 10_000])
@pytest.mark.parametrize("first", [False, True])
def test_a_byte_now_and_then_does_not_keep_a_connection(slow: bytes, first: bool):
    async def work() -> None:
        async with bounded_server(head_seconds=0.2) as server:
            reader, writer = await server.connect()
            if first:
                writer.write(GET)
                await reader.readuntil(b"size 0")
            ended = asyncio.create_task(read_all(reader))
            with contextlib.suppress(ConnectionError):
                for byte in slow:
                    writer.write(bytes([byte]))
                    await asyncio.sleep(0.01)
                    if ended.done():
                        break
            assert b" 408 " in await ended

    run(work)


@pytest.mark.parametrize("path", [b"/", b"/early"])
def test_a_body_that_does_not_arrive_in_time_ends_the_connection(path: bytes):
    async def work() -> None:
        async with bounded_server(head_seconds=0.1, body_seconds=0.1) as server:
            await server.ask(POST.replace(b" / ", b" " + path + b" "), b"some of it")
            await until(lambda: server.table.open == 0)
            await until(lambda: not server.state.tasks)

    run(work)


@pytest.mark.parametrize("asked", [GET, LAST], ids=["kept", "closed"])
def test_an_answer_that_is_not_read_ends_the_connection(asked: bytes):
    async def work() -> None:
        async with bounded_server(send_seconds=0.2) as server:
            _, writer = await server.connect()
            writer.write(asked.replace(b" / ", b" /large ") * 3)
            await until(lambda: server.table.counts["answers_unread"] > 0)
            await until(lambda: server.table.open == 0)
            await until(lambda: not server.state.tasks)
            writer.close()

    run(work)


def test_a_body_after_an_early_answer_is_dropped_and_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bounded_protocol, "MAX_DISCARDED_BYTES", 10 * KIB)

    async def work() -> None:
        async with bounded_server() as server:
            early = POST.replace(b" / ", b" /early ")
            answers = await server.ask(early, b"b" * 1000, LAST)
            assert answers.count(b" 200 ") == 2
            endless = early.replace(b"1000", b"10000000")
            assert (await server.ask(endless, *[b"b" * KIB] * 1000)).count(b" 200 ") <= 1
            await until(lambda: server.table.open == 0)

    run(work)


def test_an_idle_connection_ends_after_the_keep_alive_time():
    async def work() -> None:
        async with bounded_server() as server:
            reader, writer = await server.connect()
            writer.write(GET)
            assert b"200 OK" in await reader.readuntil(b"size 0")
            (connection,) = server.state.connections
            assert connection.timeout_keep_alive_task is not None
            connection.timeout_keep_alive_handler()
            assert await read_all(reader) == b""
            writer.close()

    run(work)


def test_a_connection_that_was_reset_leaves_nothing_behind():
    async def work() -> None:
        async with bounded_server() as server:
            reader, writer = await server.connect()
            writer.write(GET)
            await reader.readuntil(b"size 0")
            (connection,) = server.state.connections
            writer.transport.abort()
            await until(lambda: server.table.open == 0)
            assert connection.timeout_keep_alive_task is None

    run(work)
