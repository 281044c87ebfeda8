"""The process around an app: its settings, its socket and its server.

How it lives and ends is in process_life.py. Touch this when processes start or listen in another
way.
"""

import asyncio
import contextlib
import gc
import os
import socket
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import uvicorn
from uvicorn.config import STARTUP_FAILURE

from slipstream.serving.http.acceptor import Acceptor, CertificateFiles
from slipstream.serving.http.api_keys import ApiKey, Keys, parse_keys
from slipstream.serving.http.bounded_protocol import BoundedProtocol
from slipstream.serving.http.connection_table import (
    ConnectionLimits,
    ConnectionTable,
    raise_file_limit,
)
from slipstream.serving.http.observation import ObservationSettings, observe
from slipstream.serving.http.process_life import END_NOW, ProcessLife

SWITCH_SECONDS = 0.0001  # the event loop waits no longer for bytecode of another thread
CANNOT_START = 78  # exit code of a process that would fail the same way again
SECRET_VARIABLE, KEYS_VARIABLE, INSTANCE_KEY_VARIABLE = (
    "SLIPSTREAM_TICKET_SECRET",
    "SLIPSTREAM_API_KEYS",
    "SLIPSTREAM_INSTANCE_KEY",
)


class ProcessSettings(msgspec.Struct, kw_only=True):
    """Settings of every process, as JSON on a line of stdin; keys are in the environment."""

    host: str = "127.0.0.1"
    port: int = 0
    socket_fd: int | None = None  # a listening socket inherited from the supervisor
    socket_path: str | None = None  # a Unix socket instead of host and port
    open_to: tuple[str, int] | None = None  # beside it, where other machines reach the process
    connections: ConnectionLimits = ConnectionLimits()
    tls_certificate: str | None = None  # PEM files
    tls_key: str | None = None
    linger: float = 0.0
    drain_seconds: float = 10.0
    watch_parent: bool = False
    heartbeat: str | None = None  # file of the process's heartbeat, which its supervisor watches
    observation: ObservationSettings = msgspec.field(default_factory=ObservationSettings)


Settings = TypeVar("Settings", bound=ProcessSettings)


def read_settings(argument: str, kind: type[Settings]) -> Settings:
    """Decode the settings of a process from its argument; `-` reads them from stdin.

    Every user of a machine can read arguments, so the supervisor writes settings to stdin.
    """
    text = sys.stdin.readline() if argument == "-" else argument
    if not text or text == END_NOW.decode():
        sys.exit(0)  # the supervisor ended before the process was needed
    settings = msgspec.json.decode(text, type=kind)
    observe(settings.observation, os.environ.get(SECRET_VARIABLE, ""))
    return settings


class _Server(uvicorn.Server):
    """uvicorn with our acceptor, and without its own signal handlers: ours drain first."""

    def __init__(
        self, config: uvicorn.Config, table: ConnectionTable, certificate: CertificateFiles | None
    ) -> None:
        super().__init__(config)
        self._table, self._certificate = table, certificate

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the app, then accept connections."""
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(STARTUP_FAILURE)

        def make_protocol(peer: str | None) -> asyncio.Protocol:
            state = self.lifespan.state
            return BoundedProtocol(self.config, self.server_state, state, self._table, peer)

        listeners = [
            Acceptor(sock, self._table, make_protocol, self._certificate) for sock in sockets or []
        ]
        self.servers = listeners  # type: ignore[assignment]  # closed and awaited, nothing else
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def secret_from_environment() -> bytes:
    """Read the ticket secret that all processes of a deployment share."""
    return os.environ[SECRET_VARIABLE].encode()


def keys_from_environment() -> Keys:
    """Read the API keys of clients and operators, one a line."""
    return Keys(parse_keys(os.environ.get(KEYS_VARIABLE, "").splitlines()))


def instance_keys() -> Keys:
    """Read the key by which instances know their routers; they may do everything."""
    secret = os.environ.get(INSTANCE_KEY_VARIABLE)
    return Keys([ApiKey(secret, "admin")] if secret else [])


def listening_socket(host: str, port: int) -> socket.socket:
    """Open a listening socket; port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((host, port))
    bound.listen(2048)
    return bound


def reserve_port(host: str, port: int) -> socket.socket:
    """Bind an address without listening: no other user gets it, and connections are refused.

    A process of the same user listens there all the same; port 0 takes a free one.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound


def unix_socket(path: str) -> socket.socket:
    """Open a listening Unix socket; one that a killed process left behind is replaced."""
    beside = f"{path}.new"
    Path(beside).unlink(missing_ok=True)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    bound.bind(beside)
    os.chmod(beside, 0o600)
    bound.listen(2048)
    os.replace(beside, path)  # connections are refused or accepted, never without a path
    return bound


def _open_sockets(settings: ProcessSettings) -> list[socket.socket]:
    if settings.socket_fd is not None:
        opened = [socket.socket(fileno=settings.socket_fd)]
    elif settings.socket_path is not None:
        opened = [unix_socket(settings.socket_path)]
    else:
        opened = [listening_socket(settings.host, settings.port)]
    if settings.open_to is not None:
        opened.append(reserve_port(*settings.open_to))
        opened[-1].listen(2048)
    return opened


def open_table(settings: ProcessSettings) -> ConnectionTable:
    """Make the table of a process's connections, with as many files as it may have."""
    raise_file_limit()
    return ConnectionTable(settings.connections)


def run_app(
    app: Any,
    settings: ProcessSettings,
    start_draining: Callable[[], None],
    table: ConnectionTable | None = None,
    is_alive: Callable[[], bool] = lambda: True,
) -> None:
    """Serve until a signal or the supervisor's death; `start_draining` is called first.

    `table` counts the connections; a server that shows it in its metrics brings it. The process's
    heart beats while `is_alive`.
    """
    table = table or open_table(settings)
    certificate = None
    if settings.tls_certificate is not None and settings.tls_key is not None:
        certificate = CertificateFiles(settings.tls_certificate, settings.tls_key)
    # Whatever is loaded by now stays: collections walk over the objects of requests only.
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH_SECONDS)
    sockets = _open_sockets(settings)
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="on",
        access_log=False,
        proxy_headers=False,
        log_config=None,
        log_level="warning",
        timeout_keep_alive=max(1, round(settings.connections.keep_alive_seconds)),
        timeout_graceful_shutdown=max(1, round(settings.drain_seconds)),
        server_header=False,
        date_header=False,
    )
    server = _Server(config, table, certificate)

    async def serve() -> None:
        life = ProcessLife(
            server,
            start_draining,
            linger=settings.linger,
            heartbeat=settings.heartbeat,
            watch_parent=settings.watch_parent,
            is_alive=is_alive,
        )
        async with life.watching():
            await server.serve(sockets=sockets)

    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(serve())
