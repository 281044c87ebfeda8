"""Accepts the connections of a server: counted before anything is spent on them, then TLS and HTTP.

A peer above its limit costs an `accept` and a `close`; no TLS handshake, no parser. Certificates
that change on disk are used from the next connection on. Touch this when connections are accepted
in another way.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

from slipstream.errors import SlipstreamError
from slipstream.serving.http.bounded_protocol import plain_refusal
from slipstream.serving.http.connection_table import ConnectionTable, peer_of

BATCH = 64  # connections accepted before requests are served again
SWEEP_SECONDS = 0.5
PAUSE_SECONDS = 0.5  # when the process has no file left for a connection
CERTIFICATE_SECONDS = 30.0
MakeProtocol = Callable[[str | None], asyncio.Protocol]
_REFUSAL = plain_refusal(
    b"503 Service Unavailable",
    "too_many_connections",
    "too many connections are open; use fewer and keep them",
)


class CertificateFiles:
    """A certificate and its key as files, and the TLS context made of them."""

    def __init__(self, certificate: str, key: str) -> None:
        self._certificate, self._key = certificate, key
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.options |= ssl.OP_NO_RENEGOTIATION
        self._changed = self._stamp()
        self._load()

    def reload(self) -> None:
        """Use files that were replaced; what cannot be read leaves the present ones in use."""
        with contextlib.suppress(OSError, SlipstreamError):
            changed = self._stamp()
            if changed != self._changed:
                self._load()
                self._changed = changed

    def _load(self) -> None:
        try:
            self.context.load_cert_chain(self._certificate, self._key)
        except (OSError, ssl.SSLError) as error:
            raise SlipstreamError(
                f"the certificate {self._certificate} and its key {self._key} cannot be used "
                f"({error.strerror or error}); give a PEM certificate and its unencrypted key"
            ) from error

    def _stamp(self) -> tuple[int, ...]:
        paths = (Path(self._certificate), Path(self._key))
        return tuple(path.stat().st_mtime_ns for path in paths if path.exists())


class Acceptor:
    """Accepts from a listening socket until it is closed. uvicorn takes it for a server."""

    def __init__(
        self,
        listening: socket.socket,
        table: ConnectionTable,
        make_protocol: MakeProtocol,
        certificate: CertificateFiles | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket, self._table, self._make = listening, table, make_protocol
        self._certificate = certificate
        self._starting: set[asyncio.Task[None]] = set()
        self._closed = False
        listening.setblocking(False)
        self._resume()
        self._sweep()
        self._check_certificate()

    def close(self) -> None:
        """Accept no more; connections that are open stay."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._socket.fileno())

    async def wait_closed(self) -> None:
        """Wait for the TLS handshakes under way."""
        if self._starting:
            await asyncio.wait(self._starting)

    def _resume(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._socket.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(BATCH):
            try:
                connection, address = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:  # no file or memory is left
                self._loop.remove_reader(self._socket.fileno())
                self._loop.call_later(PAUSE_SECONDS, self._resume)
                return
            peer = peer_of(address)
            if self._table.admit(peer) is None:
                connection.setblocking(False)
                task = self._loop.create_task(self._start(connection, peer))
                self._starting.add(task)
                task.add_done_callback(self._starting.discard)
            else:
                self._refuse(connection)

    def _refuse(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            if self._certificate is None:
                connection.setblocking(False)
                connection.send(_REFUSAL)

    async def _start(self, connection: socket.socket, peer: str | None) -> None:
        """Begin to serve a connection; its protocol counts its end."""
        limits, context = self._table.limits, None
        seconds = None
        if self._certificate is not None:
            context, seconds = self._certificate.context, limits.head_seconds
        protocol: asyncio.Protocol | None = None

        def make() -> asyncio.Protocol:
            nonlocal protocol
            protocol = self._make(peer)
            return protocol

        began = False
        try:
            await self._loop.connect_accepted_socket(
                make, connection, ssl=context, ssl_handshake_timeout=seconds
            )
            began = True
        except (OSError, ssl.SSLError, TimeoutError):
            self._table.counts["handshakes_failed"] += 1
        finally:
            if not began and getattr(protocol, "transport", None) is None:
                self._table.leave(peer)
                connection.close()

    def _sweep(self) -> None:
        self._table.sweep(self._loop.time())
        if not self._closed or self._table.open:
            self._loop.call_later(SWEEP_SECONDS, self._sweep)

    def _check_certificate(self) -> None:
        if self._certificate is not None and not self._closed:
            self._certificate.reload()
            self._loop.call_later(CERTIFICATE_SECONDS, self._check_certificate)
