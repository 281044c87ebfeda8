"""`slipstream serve` as a user starts it, for benchmarks over HTTP.

Touch this when a benchmark needs something else of a running server.
"""

import contextlib
import http.client
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from slipstream.errors import SlipstreamError

END_SECONDS = 60.0


@dataclass(frozen=True)
class ServedProcess:
    """A running server: its address, and the process id of its supervisor."""

    url: str
    pid: int


def child_environment(key: str = "", admin_key: str = "") -> dict[str, str]:
    """Return the environment of a command that imports what this process imports."""
    places = [os.path.abspath(each) for each in sys.path if each]
    keys = {"SLIPSTREAM_API_KEY": key, "SLIPSTREAM_ADMIN_KEY": admin_key}
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places), **keys}


@contextlib.contextmanager
def served(bundle: Path, *options: str, processes: int = 2) -> Iterator[str]:
    """Run `slipstream serve BUNDLE --port 0 …` until the block ends; give its URL.

    `processes` is how many instances and routers must be ready before the block begins.
    """
    with served_process(bundle, *options, processes=processes) as server:
        yield server.url


@contextlib.contextmanager
def served_process(
    bundle: Path, *options: str, processes: int = 2, key: str = "", admin_key: str = ""
) -> Iterator[ServedProcess]:
    """Run a server as `served` does; give its address and its supervisor's process id.

    With keys, it asks for them; a server with one for clients only has no operator.
    """
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "slipstream", "serve", str(bundle), "--port", "0", *options],
        env=child_environment(key, admin_key),
        cwd=bundle.parent,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        text = ""
        while text.count("is ready") < processes:
            line = process.stdout.readline()
            if not line:
                raise SlipstreamError(f"'slipstream serve' failed: {text.strip()[-2_000:]}")
            text += line
        url = re.search(r"http://[0-9.:]+", text)
        assert url is not None
        yield ServedProcess(url.group(), process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Connection:
    """One kept-alive connection that sends bodies already encoded."""

    def __init__(self, url: str, deadline_ms: float = 60_000) -> None:
        address = urlsplit(url)
        self._connection = http.client.HTTPConnection(
            address.hostname or "", address.port, timeout=deadline_ms / 1000 + 2
        )
        self._headers = {
            "content-type": "application/json",
            "x-slipstream-deadline-ms": f"{deadline_ms:g}",
        }

    def post(self, path: str, body: bytes) -> bytes:
        """Send a request and return the body of its answer; a refusal is an error."""
        self._connection.request("POST", path, body, self._headers)
        answer = self._connection.getresponse()
        content = answer.read()
        if answer.status >= 300:
            raise SlipstreamError(f"{path} was answered {answer.status}: {content[:500]!r}")
        return content

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
