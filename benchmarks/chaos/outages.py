"""What breaks around a deployment: a file system that fills, a Redis server that is killed.

Touch this when something else outside the serving processes should fail.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from slipstream.errors import SlipstreamError

START_SECONDS = 30.0


def can_mount() -> bool:
    """Whether this process may make a file system of its own."""
    return os.geteuid() == 0 and shutil.which("mount") is not None


@contextlib.contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    """Make a file system of a few megabytes, for the block."""
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


@contextlib.contextmanager
def full_disk(disk: Path) -> Iterator[None]:
    """Leave no room on a file system, for the block."""
    filler = disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
    try:
        yield
    finally:
        filler.unlink()


class RedisProcess:
    """A Redis server whose writes are on disk before they are answered; `start` after `kill`."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start the server over what it wrote before, and wait until it listens."""
        program = shutil.which("redis-server")
        if program is None:
            raise SlipstreamError("redis-server is not installed; apt-get install redis-server")
        where = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._directory)]
        kept = ["--save", "", "--appendonly", "yes", "--appendfsync", "always"]
        self._process = subprocess.Popen([program, *where, *kept], stdout=subprocess.DEVNULL)
        end = time.monotonic() + START_SECONDS
        while not self._listens():
            if time.monotonic() > end or self._process.poll() is not None:
                raise SlipstreamError("redis-server did not start; is its port taken?")
            time.sleep(0.02)

    def kill(self) -> None:
        """Kill the server, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0
