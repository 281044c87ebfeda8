"""The process around an app: its socket, its signals and its orderly end.

SIGTERM, SIGINT or the supervisor's death start the end: the app is no longer ready, serves
for `linger` more seconds so that routers notice, then accepts no connection, finishes the requests
it has and ends. A second signal does not shorten this. Touch this when processes start or end in
another way.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Generator
from typing import Any

import msgspec
import uvicorn

KEEP_ALIVE_SECONDS = 3_600  # routers must close first: they take a closed connection for a failure
CANNOT_START = 78  # exit code of a process that would fail the same way again
SECRET_VARIABLE, KEYS_VARIABLE, INSTANCE_KEY_VARIABLE = (
    "SLIPSTREAM_TICKET_SECRET",
    "SLIPSTREAM_API_KEYS",
    "SLIPSTREAM_INSTANCE_KEY",
)


class ProcessSettings(msgspec.Struct, kw_only=True):
    """Settings of every process, as JSON in its first argument; secrets are in the environment."""

    host: str = "127.0.0.1"
    port: int = 0
    socket_fd: int | None = None  # a listening socket inherited from the supervisor
    linger: float = 0.0
    drain_seconds: float = 10.0
    watch_parent: bool = False


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: ours drain first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def secret_from_environment() -> bytes:
    """Read the ticket secret that all processes of a deployment share."""
    return os.environ[SECRET_VARIABLE].encode()


def keys_from_environment(variable: str) -> tuple[str, ...]:
    """Read API keys, separated by commas."""
    return tuple(key for key in os.environ.get(variable, "").split(",") if key)


def listening_socket(host: str, port: int) -> socket.socket:
    """Open a listening socket; port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((host, port))
    bound.listen(2048)
    return bound


def run_app(app: Any, settings: ProcessSettings, start_draining: Callable[[], None]) -> None:
    """Serve until a signal or the supervisor's death; `start_draining` is called first."""
    if settings.socket_fd is not None:
        sock = socket.socket(fileno=settings.socket_fd)
    else:
        sock = listening_socket(settings.host, settings.port)
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="on",
        access_log=False,
        proxy_headers=False,
        log_level="warning",
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=max(1, round(settings.drain_seconds)),
        server_header=False,
        date_header=False,
    )
    server = _Server(config)

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        ending: list[asyncio.Task[None]] = []

        async def end() -> None:
            start_draining()
            await asyncio.sleep(settings.linger)
            server.should_exit = True

        def begin_end() -> None:
            if not ending:
                ending.append(loop.create_task(end()))

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, begin_end)
        if settings.watch_parent:
            loop.add_reader(sys.stdin.fileno(), _on_parent_gone, loop, begin_end)
        await server.serve(sockets=[sock])

    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(serve())


def _on_parent_gone(loop: asyncio.AbstractEventLoop, begin_end: Callable[[], None]) -> None:
    """Begin the end: stdin is readable only when the supervisor, which never writes, is gone."""
    loop.remove_reader(sys.stdin.fileno())
    begin_end()
