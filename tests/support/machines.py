"""Machines for tests: network namespaces joined by a cable, and `slipstream serve` inside them."""

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.support.serve_command import ADMIN, KEY, LONG
from tests.support.serving_fixtures import wait_until

ADDRESSES = ("10.231.7.1", "10.231.7.2")  # of the namespaces that benchmarks.pipeline.link joins
_NEW_NETWORK = 0x40000000


def why_no_machines() -> str:
    """Why namespaces cannot be made here; empty where they can."""
    if os.name != "posix" or os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need `ip` (apt-get install iproute2)"
    made = subprocess.run(["unshare", "--net", "true"], capture_output=True, timeout=20)
    return "" if made.returncode == 0 else "this container may make no network namespaces"


@contextlib.contextmanager
def inside(name: str) -> Iterator[None]:
    """Let this thread, and the processes it starts, be in a network namespace."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        _enter(there)
        yield
    finally:
        _enter(home)
        os.close(there)
        os.close(home)


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "setns")


class ServeProcess:
    """`slipstream serve` in a namespace: its process, its log, the address of its router."""

    def __init__(self, place: Path, name: str, key: str, words: tuple[str, ...]) -> None:
        self.log_file = place / f"{name}.log"
        command = [sys.executable, "-u", "-m", "slipstream", "serve", *words]
        command += ["--state", str(place / f"{name}-state"), "--deadline-ms", "60000"]
        keys = {"SLIPSTREAM_API_KEY": KEY, "SLIPSTREAM_ADMIN_KEY": ADMIN}
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **keys, "SLIPSTREAM_CLUSTER_KEY": key},
                stdout=log,
                stderr=log,
                cwd=place,
            )

    @property
    def log(self) -> str:
        """What it has said so far."""
        return self.log_file.read_text()

    @property
    def url(self) -> str:
        """The address of its router."""
        (found,) = re.findall(r"serving .* at (http://[0-9.:]+)", self.log)
        return str(found)

    def wait_for(self, pattern: str, times: int = 1) -> None:
        """Wait until the log has a line like this."""

        def is_there() -> bool:
            text = self.log
            assert self.process.poll() is None, text
            return len(re.findall(pattern, text)) >= times

        wait_until(is_there, 2 * LONG)


@contextlib.contextmanager
def serve_on(
    namespace: str, place: Path, name: str, key: str, *words: str
) -> Iterator[ServeProcess]:
    """Run `slipstream serve` in a namespace; end it with SIGTERM."""
    with inside(namespace):
        served = ServeProcess(place, name, key, words)
    try:
        yield served
    finally:
        served.process.send_signal(signal.SIGTERM)
        try:
            served.process.wait(LONG)
        finally:
            served.process.kill()
