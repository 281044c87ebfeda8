"""HTTP/1.1 on one connection, with bounds: uvicorn's protocol, which has none of its own.

Bounded are the bytes around a body (request line, headers, trailers, chunk marks), the number of
headers and of pipelined requests, the time a head and a body may take to arrive, the time a client
may take to read its answer, and what is read on after an early refusal. So the memory of a
connection is bounded whatever its client does. Touch this when a connection gets another bound.
"""

import asyncio
import math
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from slipstream.serving.http.connection_table import ConnectionTable
from slipstream.serving.http.messages import Problem

LINGER_SECONDS = 2.0  # after a refusal, so that a client that is still sending reads it
MAX_DISCARDED_BYTES = 32 * 2**20  # of a body whose request was answered before its end
NEVER = math.inf
PHRASES = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large"}
OVERSIZED, MALFORMED, LATE, UNREAD = (
    "requests_oversized_head",
    "requests_malformed",
    "requests_late",
    "answers_unread",
)


def plain_refusal(status: bytes, code: str, detail: str) -> bytes:
    """Return a whole answer that refuses, after which the connection is closed."""
    body = msgspec.json.encode(Problem(code, detail))
    return (
        b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
        b"connection: close\r\n\r\n%s" % (status, len(body), body)
    )


class _RefusedHeadError(Exception):
    """Raised inside the parser to stop it."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection. `due` is the moment by which what it waits for must have happened."""

    def __init__(
        self, config: Any, server_state: Any, app_state: Any, table: ConnectionTable, peer: Any
    ) -> None:
        super().__init__(config, server_state, app_state)
        self._table, self._peer, self._limits = table, peer, table.limits
        self.due = NEVER
        self._in_message = False  # between the first byte of a head and the end of the body
        self._around_body = 0  # bytes of the message being read that are not its body
        self._discarded = 0
        self._refused = False

    # Called by the event loop

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._table.watch(self)
        self.due = self.loop.time() + self._limits.head_seconds

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.unwatch(self)
        self._table.leave(self._peer)
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # its timer would keep all of this in memory

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._unset_keepalive_if_required()
        if self.due == NEVER and not self._in_message and self._is_idle():
            self.due = self.loop.time() + self._limits.head_seconds
        self._around_body += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(400, MALFORMED, "this server speaks HTTP/1.1 only; send no Upgrade header")
        except httptools.HttpParserCallbackError:
            self._refuse_head()
        except httptools.HttpParserError:
            self._refuse(400, MALFORMED, "this is not an HTTP/1.1 request")
        else:
            if self._around_body > self._limits.head_bytes:
                self._refuse_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.due = self.loop.time() + self._limits.send_seconds

    def resume_writing(self) -> None:
        super().resume_writing()
        self.due = NEVER

    # Called by the parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_message = True

    def on_headers_complete(self) -> None:
        limits = self._limits
        if self._around_body > limits.head_bytes and self._head_size() > limits.head_bytes:
            raise _RefusedHeadError
        if len(self.headers) > limits.headers or len(self.pipeline) >= limits.pipelined:
            raise _RefusedHeadError
        super().on_headers_complete()
        self.due = self.loop.time() + limits.body_seconds

    def on_body(self, body: bytes) -> None:
        self._around_body -= len(body)
        if self.cycle.response_complete:
            self._discarded += len(body)
            if self._discarded > MAX_DISCARDED_BYTES:
                self.transport.abort()
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_message, self._around_body, self._discarded = False, 0, 0
        self.due = NEVER

    # Called by uvicorn

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._in_message:  # its body, or a pipelined head, still arrives
            self.due = self.loop.time() + self._limits.head_seconds

    def timeout_keep_alive_handler(self) -> None:
        self.transport.abort()  # `close` would wait for a client that does not read

    # Called by the table

    def expire(self) -> None:
        """End the connection: its request, or its client's reading, took too long."""
        if self.flow.write_paused:
            self._table.counts[UNREAD] += 1
            self.transport.abort()
        elif self._refused or self.transport.is_closing():
            self.transport.abort()
        else:
            self._refuse(408, LATE, "the request did not arrive in time")

    def _is_idle(self) -> bool:
        """Whether no request of this connection is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _head_size(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def _refuse_head(self) -> None:
        limits = self._limits
        self._refuse(
            431,
            OVERSIZED,
            f"the head of a request has at most {limits.head_bytes:,} bytes and {limits.headers} "
            f"headers, and {limits.pipelined} requests may follow each other unanswered",
        )

    def _refuse(self, status: int, counter: str, detail: str) -> None:
        """Answer and close; what still arrives for a moment is dropped, so that it is read."""
        self._table.counts[counter] += 1
        if self.transport.is_closing():
            return
        if not self._is_idle():
            self.transport.abort()
            return
        self._refused = True
        self.due = self.loop.time() + LINGER_SECONDS
        line = b"%d %s" % (status, PHRASES[status])
        code = {408: "timeout", 431: "head_too_large"}.get(status, "bad_request")
        self.transport.write(plain_refusal(line, code, detail))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()
