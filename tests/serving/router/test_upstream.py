"""Connections to an instance: kept, bounded, and errors that say whether the request was sent."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from slipstream.serving.router import upstream as module
from slipstream.serving.router.upstream import (
    ConnectError,
    ConnectionLostError,
    PoolFullError,
    Upstream,
)

REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-Name: a\r\n\r\nhi"
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(autouse=True)
def patient_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take long to connect."""
    monkeypatch.setattr(module, "CONNECT_SECONDS", 60.0)


class Server:
    """A server that answers each request with the next of `answers`; the last one repeats."""

    def __init__(self, *answers: bytes) -> None:
        self.answers, self.connections, self.requests = list(answers), 0, 0
        self.release = asyncio.Event()
        self.release.set()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                self.requests += 1
                await self.release.wait()
                answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                if not answer:
                    break
                writer.write(answer)
        writer.close()


@contextlib.asynccontextmanager
async def connected(server: Serve) -> AsyncIterator[Upstream]:
    listening = await asyncio.start_server(server, "127.0.0.1", 0)
    upstream = Upstream("127.0.0.1", listening.sockets[0].getsockname()[1])
    yield upstream
    upstream.close()
    listening.close()


def test_an_answer_comes_whole_over_one_kept_connection():
    async def work() -> None:
        server = Server(OK)
        async with connected(server) as upstream:
            for _ in range(3):
                status, headers, body = await upstream.request(REQUEST, 60.0)
                assert (status, body) == (200, b"hi")
                assert headers == [(b"content-length", b"2"), (b"x-name", b"a")]
            assert server.connections == 1

    asyncio.run(work())


def test_an_instance_on_a_unix_socket_is_reached_by_its_path(tmp_path: Path):
    async def work() -> None:
        path = str(tmp_path / "i-0.sock")
        upstream = Upstream("", 0, path=path)
        with pytest.raises(ConnectError):
            await upstream.request(REQUEST, 60.0)
        listening = await asyncio.start_unix_server(Server(OK), path)
        assert (await upstream.request(REQUEST, 60.0)).body == b"hi"
        upstream.close()
        listening.close()

    asyncio.run(work())


def test_requests_at_the_same_time_have_connections_of_their_own():
    async def work() -> None:
        server = Server(OK)
        async with connected(server) as upstream:
            await asyncio.gather(*(upstream.request(REQUEST, 60.0) for _ in range(5)))
            assert server.connections == 5

    asyncio.run(work())


def test_a_connection_the_server_closes_is_not_used_again():
    async def work() -> None:
        server = Server(OK.replace(b"\r\nX-Name", b"\r\nConnection: close\r\nX-Name"), OK)
        async with connected(server) as upstream:
            for _ in range(2):
                assert (await upstream.request(REQUEST, 60.0)).body == b"hi"
            assert server.connections == 2

    asyncio.run(work())


def test_nobody_listening_means_that_the_request_was_not_sent():
    async def work() -> None:
        async with connected(Server(OK)) as upstream:
            pass
        with pytest.raises(ConnectError):
            await upstream.request(REQUEST, 60.0)

    asyncio.run(work())


@pytest.mark.parametrize(("seconds", "error"), [(0.05, TimeoutError), (60.0, ConnectError)])
def test_a_connection_that_takes_longer_than_the_request_has_says_nothing_of_the_instance(
    seconds: float, error: type[Exception], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("slipstream.serving.router.upstream.CONNECT_SECONDS", 0.2)

    async def work() -> None:
        with socket.socket() as full, contextlib.ExitStack() as waiting:
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            for _ in range(3):  # nobody accepts, so no further connection comes about
                one = waiting.enter_context(socket.socket())
                one.setblocking(False)
                one.connect_ex(full.getsockname())
            with pytest.raises(error):
                await Upstream(*full.getsockname()).request(REQUEST, seconds)

    asyncio.run(work())


@pytest.mark.parametrize("answer", [b"", b"\x00 this is not HTTP\r\n\r\n", OK[:-1]])
def test_a_connection_that_ends_leaves_the_outcome_open(answer: bytes):
    async def work() -> None:
        async with connected(Server(answer, b"")) as upstream:
            with pytest.raises(ConnectionLostError):
                await upstream.request(REQUEST + REQUEST, 60.0)  # the second one closes it

    asyncio.run(work())


def test_a_slow_answer_is_a_timeout_and_its_connection_is_closed():
    async def work() -> None:
        server = Server(OK)
        async with connected(server) as upstream:
            await upstream.request(REQUEST, 60.0)  # opens the connection
            server.release.clear()
            with pytest.raises(TimeoutError):
                await upstream.request(REQUEST, 0.05)
            server.release.set()
            assert (await upstream.request(REQUEST, 60.0)).body == b"hi"
            assert server.connections == 2

    asyncio.run(work())


def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MAX_CONNECTIONS", 2)

    async def work() -> None:
        server = Server(OK)
        async with connected(server) as upstream:
            server.release.clear()
            running = [asyncio.create_task(upstream.request(REQUEST, 60.0)) for _ in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(PoolFullError):
                await upstream.request(REQUEST, 60.0)
            server.release.set()
            assert [answer.body for answer in await asyncio.gather(*running)] == [b"hi"] * 2
            assert (await upstream.request(REQUEST, 60.0)).body == b"hi"

    asyncio.run(work())


def test_an_endless_answer_is_cut(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MAX_ANSWER_BYTES", 100)

    async def work() -> None:
        long = b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n" + b"x" * 1000
        async with connected(Server(long)) as upstream:
            with pytest.raises(ConnectionLostError):
                await upstream.request(REQUEST, 60.0)

    asyncio.run(work())
