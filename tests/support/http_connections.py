"""A server of bounded connections in this process, and clients that send bytes as they like."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from uvicorn.server import ServerState

from slipstream.serving.http import acceptor
from slipstream.serving.http.acceptor import Acceptor, CertificateFiles
from slipstream.serving.http.bounded_protocol import BoundedProtocol
from slipstream.serving.http.connection_table import ConnectionLimits, ConnectionTable
from slipstream.serving.http.process import listening_socket

LONG = 60.0  # seconds; only ends a test that hangs


async def echo_app(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the size of the body; /large with 32 MiB, /early before the body is read."""
    size, more = 0, scope["path"] != "/early"
    while more:
        message = await receive()
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    body = b"x" * 2**25 if scope["path"] == "/large" else b"size %d" % size
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@dataclass
class Server:
    """An open server: its port, its table, what it still does."""

    port: int
    table: ConnectionTable
    state: ServerState

    async def connect(
        self, source: str = "127.0.0.1", context: ssl.SSLContext | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        name = "localhost" if context else None
        return await asyncio.open_connection(
            "127.0.0.1", self.port, local_addr=(source, 0), ssl=context, server_hostname=name
        )

    async def ask(self, *parts: bytes, source: str = "127.0.0.1") -> bytes:
        """Send the parts, return all that comes until the server closes."""
        reader, writer = await self.connect(source)
        with contextlib.suppress(ConnectionError):
            for part in parts:
                writer.write(part)
                await writer.drain()
        try:
            return await read_all(reader)
        finally:
            writer.close()


async def read_all(reader: asyncio.StreamReader) -> bytes:
    """Read until the connection ends, in whichever way."""
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := await asyncio.wait_for(reader.read(65_536), LONG):
            parts.append(part)
    return b"".join(parts)


@contextlib.asynccontextmanager
async def bounded_server(
    certificate: CertificateFiles | None = None, **limits: Any
) -> AsyncIterator[Server]:
    config = uvicorn.Config(echo_app, ws="none", log_level="critical")
    config.load()
    state, table = ServerState(), ConnectionTable(ConnectionLimits(**limits))
    with listening_socket("127.0.0.1", 0) as listening:
        accepting = Acceptor(
            listening,
            table,
            lambda peer: BoundedProtocol(config, state, {}, table, peer),
            certificate,
        )
        try:
            yield Server(listening.getsockname()[1], table, state)
        finally:
            accepting.close()
            for connection in list(state.connections):
                connection.transport.abort()
            await accepting.wait_closed()


def run(work: Callable[[], Awaitable[None]]) -> None:
    """Run a test's coroutine on the event loop that servers use."""

    async def whole() -> None:
        await work()

    swept, acceptor.SWEEP_SECONDS = acceptor.SWEEP_SECONDS, 0.01
    try:
        uvloop.run(whole())
    finally:
        acceptor.SWEEP_SECONDS = swept


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, or fail loudly."""
    async with asyncio.timeout(LONG):
        while not condition():
            await asyncio.sleep(0.005)


def self_signed(directory: Path) -> tuple[Path, Path]:
    """Make a certificate for localhost as the guide does; return it and its key."""
    import subprocess

    certificate, key = directory / "cert.pem", directory / "key.pem"
    command = (
        f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 30 "
        f"-subj /CN=localhost -addext subjectAltName=DNS:localhost,IP:127.0.0.1 "
        f"-keyout {key} -out {certificate}"
    )
    subprocess.run(command.split(), check=True, capture_output=True, timeout=LONG)
    return certificate, key


def ask_plainly(port: int, request: bytes, source: str = "127.0.0.1") -> bytes:
    """Send a request with a blocking socket, return the answer until the end of the connection."""
    with socket.create_connection(("127.0.0.1", port), LONG, source_address=(source, 0)) as asking:
        asking.sendall(request)
        return b"".join(iter(lambda: asking.recv(65_536), b""))
