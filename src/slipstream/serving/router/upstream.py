"""The router's connections to one instance: HTTP/1.1 kept alive, bytes in and bytes out.

A general HTTP client spends most of its time on objects that a router never reads. Here a request
is one write and an answer is one callback, parsed by httptools. The errors tell a router whether
the request was surely not carried out, so that it may try another instance. Touch this when
requests travel to instances in another way.
"""

import asyncio
from typing import NamedTuple, cast

import httptools

from slipstream.serving.clock import SYSTEM_CLOCK, Clock

CONNECT_SECONDS = 1.0
IDLE_SECONDS = 60.0
MAX_CONNECTIONS = 512
MAX_ANSWER_BYTES = 64 * 2**20


class UpstreamError(Exception):
    """An instance gave no answer. `counter` is the name under which a router counts it."""

    counter = "upstream_errors"


class ConnectError(UpstreamError):
    """There is no connection: the instance has not seen the request."""

    counter = "connect_errors"


class ConnectionLostError(UpstreamError):
    """The connection ended after the request was sent: it may have been carried out or not."""

    counter = "connections_lost"


class PoolFullError(UpstreamError):
    """All connections to this instance are in use: the instance has not seen the request."""

    counter = "pool_full"


class UpstreamAnswer(NamedTuple):
    """An instance's answer as it came."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class _Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.idle_since = 0.0
        self._waiting: asyncio.Future[UpstreamAnswer] | None = None
        self._start()

    def _start(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._parts: list[bytes] = []
        self._size = 0
        self.reusable = True

    @property
    def open(self) -> bool:
        """Whether a request can be sent."""
        return self.transport is not None and not self.transport.is_closing()

    def send(self, request: bytes, waiting: "asyncio.Future[UpstreamAnswer]") -> None:
        """Send a request; `waiting` gets its answer or its error."""
        assert self.transport is not None
        self._waiting = waiting
        self.transport.write(request)

    # Called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._fail()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._fail()

    def _fail(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_exception(ConnectionLostError())
        if self.transport is not None:
            self.transport.abort()

    # Called by httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_body(self, part: bytes) -> None:
        self._parts.append(part)
        self._size += len(part)
        if self._size > MAX_ANSWER_BYTES:
            self._fail()

    def on_message_complete(self) -> None:
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        answer = UpstreamAnswer(self._parser.get_status_code(), self._headers, body)
        keep = self._parser.should_keep_alive()
        self._headers, self._parts, self._size, self.reusable = [], [], 0, keep
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)


class Upstream:
    """A bounded pool of connections to one instance."""

    def __init__(
        self, host: str, port: int, clock: Clock = SYSTEM_CLOCK, *, path: str | None = None
    ) -> None:
        """`path` is a Unix socket; then host and port are not used."""
        self.host, self.port, self.path, self.clock = host, port, path, clock
        self._idle: list[_Connection] = []
        self._busy = 0

    @property
    def busy(self) -> bool:
        """Whether a request is under way."""
        return self._busy > 0

    async def request(self, request: bytes, seconds: float) -> UpstreamAnswer:
        """Send a whole request, return the whole answer; `TimeoutError` after `seconds`."""
        loop = asyncio.get_running_loop()
        if self._busy >= MAX_CONNECTIONS:
            raise PoolFullError
        self._busy += 1
        connection: _Connection | None = None
        timer: asyncio.TimerHandle | None = None
        reusable = False
        try:
            connection = self._take(self.clock.now()) or await self._connect(loop, seconds)
            waiting: asyncio.Future[UpstreamAnswer] = loop.create_future()
            timer = loop.call_later(seconds, _expire, waiting)
            connection.send(request, waiting)
            answer = await waiting
            reusable = connection.reusable
            return answer
        finally:
            self._busy -= 1
            if timer is not None:
                timer.cancel()
            if connection is not None and connection.transport is not None:
                if reusable:
                    connection.idle_since = self.clock.now()
                    self._idle.append(connection)
                else:
                    connection.transport.abort()

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            if connection.transport is not None:
                connection.transport.close()
        self._idle.clear()

    def _take(self, now: float) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.open and now - connection.idle_since < IDLE_SECONDS:
                return connection
            if connection.transport is not None:
                connection.transport.close()
        return None

    async def _connect(self, loop: asyncio.AbstractEventLoop, seconds: float) -> _Connection:
        try:
            async with asyncio.timeout(min(CONNECT_SECONDS, seconds)):
                if self.path is not None:
                    _, connection = await loop.create_unix_connection(_Connection, self.path)
                else:
                    _, connection = await loop.create_connection(_Connection, self.host, self.port)
        except OSError as error:
            if isinstance(error, TimeoutError) and seconds < CONNECT_SECONDS:
                raise  # the request's own time is over: that says nothing of the instance
            raise ConnectError from error
        return connection


def _expire(waiting: "asyncio.Future[UpstreamAnswer]") -> None:
    if not waiting.done():
        waiting.set_exception(TimeoutError())
