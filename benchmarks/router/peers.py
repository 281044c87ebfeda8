"""Routers and workers of the router benchmark: ours and sglang-router, each a process of its own.

Touch this when another router should be compared.
"""

import asyncio
import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import httptools
import msgspec

from slipstream.errors import SlipstreamError
from slipstream.serving.http.process import INSTANCE_KEY_VARIABLE, KEYS_VARIABLE, SECRET_VARIABLE

PEER_VARIABLE = "SLIPSTREAM_SGLANG_ROUTER"
HOW_TO_INSTALL = (
    "`pip install sglang-router` into an environment of its own and set "
    f"{PEER_VARIABLE} to its program `sglang-router`"
)
START_SECONDS = 30.0


class _Worker(asyncio.Protocol):
    """Answers every request at once, so that only the router is measured."""

    answers: dict[bytes, bytes]

    def __init__(self, answers: dict[bytes, bytes], usual: bytes) -> None:
        self._answers, self._usual, self._parser = answers, usual, httptools.HttpRequestParser(self)
        self._url = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._url = url

    def on_message_complete(self) -> None:
        body = self._answers.get(self._url, self._usual)
        head = (
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            % len(body)
        )
        self._transport.write(head + body)  # type: ignore[attr-defined]


def run_worker(port: int) -> None:
    """Run one worker process."""
    status = {
        "instance": "w",
        "version": "v",
        "ready": True,
        "draining": False,
        "backlog": 0,
        "stats": {},
    }
    model = {"model_path": "m", "is_generation": True, "served_model_name": "m"}
    scores = {
        "scores": {"score": [0.001 * place for place in range(100)]},
        "version": "v",
        "instance": "w",
        "hit": "device",
    }
    answers = {b"/v1/status": msgspec.json.encode(status)}
    for path in (b"/get_model_info", b"/get_server_info", b"/model_info", b"/server_info"):
        answers[path] = msgspec.json.encode(model)
    answers[b"/v1/models"] = msgspec.json.encode(
        {"object": "list", "data": [{"id": "m", "object": "model"}]}
    )

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: _Worker(answers, msgspec.json.encode(scores)), "127.0.0.1", port
        )
        await server.serve_forever()

    asyncio.run(serve())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def peer_command() -> list[str] | None:
    """Return the words that start sglang-router, or None where it is not installed."""
    given = os.environ.get(PEER_VARIABLE) or shutil.which("sglang-router")
    return None if given is None else [given, "launch"]


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process and all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def process(
    command: list[str], health: str, environment: dict[str, str] | None = None
) -> Iterator[int]:
    """Start a child that answers at `health`, yield its process id, and end it."""
    child = subprocess.Popen(
        command,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + START_SECONDS
        while not _answers(health):
            if child.poll() is not None or time.monotonic() > end:
                raise SlipstreamError(
                    f"`{' '.join(command[:3])} …` did not start; run it by hand to see why"
                )
            time.sleep(0.1)
        yield child.pid
    finally:
        child.terminate()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@contextlib.contextmanager
def workers(count: int) -> Iterator[list[int]]:
    """Start worker processes and yield their ports."""
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(count):
            port = free_port()
            code = f"from benchmarks.router.peers import run_worker; run_worker({port})"
            stack.enter_context(
                process([sys.executable, "-c", code], f"http://127.0.0.1:{port}/health")
            )
            ports.append(port)
        yield ports


@contextlib.contextmanager
def our_router(worker_ports: list[int], secret: str) -> Iterator[tuple[int, int]]:
    """Start a Slipstream router with API key and tickets; yield its process id and port."""
    port = free_port()
    instances = [
        {"name": f"w-{number}", "url": f"http://127.0.0.1:{w}"}
        for number, w in enumerate(worker_ports)
    ]
    settings = msgspec.json.encode({"port": port, "instances": instances}).decode()
    environment = {
        SECRET_VARIABLE: secret,
        KEYS_VARIABLE: "0123456789abcdef",
        INSTANCE_KEY_VARIABLE: secrets.token_hex(16),
    }
    command = [sys.executable, "-m", "slipstream.serving.http.router_process", settings]
    with process(command, f"http://127.0.0.1:{port}/readyz", environment) as pid:
        yield pid, port


@contextlib.contextmanager
def peer_router(worker_ports: list[int]) -> Iterator[tuple[int, int]]:
    """Start sglang-router, sticky by key; yield its process id and port."""
    port, metrics = free_port(), free_port()
    urls = [f"http://127.0.0.1:{w}" for w in worker_ports]
    command = [
        *(peer_command() or ()), "--host", "127.0.0.1", "--port", str(port), "--policy", "manual",
        "--prometheus-port", str(metrics), "--log-level", "error", "--worker-urls", *urls,
    ]  # fmt: skip
    with process(command, f"http://127.0.0.1:{port}/readiness") as pid:
        yield pid, port
