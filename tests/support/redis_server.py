"""A real Redis server for the tests of the history stores, on a free port."""

import contextlib
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.serving_fixtures import wait_until


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextlib.contextmanager
def redis_server(place: Path, port: int, *flags: str) -> Iterator[int]:
    """A server that keeps nothing on disk; the test is skipped where there is none."""
    server = shutil.which("redis-server")
    if server is None:
        pytest.skip("redis-server is not installed here (apt-get install redis-server)")
    where = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(place)]
    process = subprocess.Popen([server, *where, *flags], stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: _answers(port), 30)
        yield port
    finally:
        process.terminate()
        process.wait(10)
