"""A router over instances whose answers a test decides.

Each instance is a real socket in this process, and the router probes it as it does in production.
"""

import asyncio
import contextlib
import functools
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import quote

import pytest

from slipstream.serving.http.api_keys import ApiKey, Keys
from slipstream.serving.http.limits import Limits
from slipstream.serving.http.router_app import Router, build_router
from slipstream.serving.router.balancer import InstanceState, LoadBalancer, instance_order
from slipstream.serving.router.ticket import TicketSigner

SECRET = b"a secret of sixteen bytes or more"
SIGNER = TicketSigner(SECRET)
KEY = "0123456789abcdef"
ADMIN = Keys([ApiKey(KEY, "admin")])
RANK = {"user": "ann", "candidates": [1], "history": {"items": [1, 2, 3], "timestamps": [1, 2, 3]}}
Behaviour = Callable[["FakeInstance", asyncio.StreamWriter], Awaitable[None]]


class FakeInstance:
    """An instance whose answers a test decides; it keeps what it was sent."""

    def __init__(self, name: str) -> None:
        self.name, self.behaviour = name, answers
        self.requests: list[tuple[str, bytes, dict[str, str]]] = []
        self.draining, self.backlog, self.port = False, 0, 0
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        """Listen, on the same port as before."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def stop(self) -> None:
        """Refuse connections and close those that are open."""
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                first, *lines = head.strip().split("\r\n")
                headers = dict(line.split(": ", 1) for line in lines)
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                path = first.split(" ")[1]
                if path == "/v1/status":
                    await reply(writer, 200, self._status())
                    continue
                self.requests.append((path, body, headers))
                await self.behaviour(self, writer)
        self._writers.discard(writer)
        writer.close()

    def _status(self) -> dict[str, Any]:
        state = {"ready": not self.draining, "draining": self.draining, "backlog": self.backlog}
        return {"instance": self.name, "version": "v", "stats": {}, **state}


async def reply(writer: asyncio.StreamWriter, status: int, content: Any, **headers: str) -> None:
    body = json.dumps(content).encode()
    more = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    writer.write(
        f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{more}content-length: "
        f"{len(body)}\r\n\r\n".encode()
        + body
    )
    await writer.drain()


async def answers(fake: FakeInstance, writer: asyncio.StreamWriter) -> None:
    await reply(writer, 200, {"by": fake.name}, x_slipstream_backlog=str(fake.backlog))


async def hangs_up(fake: FakeInstance, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def hangs(fake: FakeInstance, writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def talks_nonsense(fake: FakeInstance, writer: asyncio.StreamWriter) -> None:
    writer.write(b"\x00\x01 this is not HTTP\r\n\r\n")


async def drains(fake: FakeInstance, writer: asyncio.StreamWriter) -> None:
    fake.draining = True
    await reply(writer, 503, {"error": "draining", "detail": "on the way out"})


class Face:
    """The router as its clients see it, without a socket between."""

    def __init__(self, app: Any, router: Router, fakes: dict[str, FakeInstance]) -> None:
        self.app, self.router, self.fakes = app, router, fakes

    async def ask(
        self, path: str, content: Any, method: str = "POST", **headers: str
    ) -> tuple[int, Any]:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        pairs = [
            (b"x-api-key", KEY.encode()),
            (b"content-type", b"application/json"),
            *((name.replace("_", "-").encode(), v.encode()) for name, v in headers.items()),
        ]
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": quote(path).encode(),
            "query_string": b"",
            "headers": pairs,
            "client": ("127.0.0.1", 1),
        }
        sent: list[dict[str, Any]] = []
        waiting = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            return waiting.pop()

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await self.app(scope, receive, send)
        return sent[0]["status"], json.loads(sent[1]["body"])

    def order(self, user: str = "ann") -> list[FakeInstance]:
        """The instances in the user's order."""
        ordered = instance_order(user, self.router.balancer.instances)
        return [self.fakes[instance.name] for instance in ordered]

    def never_answer(self, fake: FakeInstance) -> None:
        """Let every request to an instance time out at once, except probes."""
        upstream = self.router.upstreams[fake.name]
        answer = upstream.request

        async def request(request: bytes, seconds: float) -> Any:
            if request.startswith(b"GET /v1/status"):
                return await answer(request, seconds)
            raise TimeoutError

        upstream.request = request  # type: ignore[method-assign]

    def state(self, fake: FakeInstance) -> InstanceState:
        """What the router knows of an instance."""
        return self.router.balancer.by_name[fake.name]


@contextlib.asynccontextmanager
async def serving(
    count: int = 3, limits: Limits | None = None, keys: Keys | None = None, **balancing: Any
) -> AsyncIterator[Face]:
    """A router over `count` fake instances. Its time limits are long: no test depends on them."""
    fakes = {f"i-{number}": FakeInstance(f"i-{number}") for number in range(count)}
    for fake in fakes.values():
        await fake.start()
    instances = [
        InstanceState(name, f"http://127.0.0.1:{fake.port}") for name, fake in fakes.items()
    ]
    for instance in instances:
        instance.breaker.cooldown = 3_600.0
    limits = limits or Limits(deadline_ms=60_000)
    balancer = LoadBalancer(instances, **balancing)
    router = Router(balancer, SIGNER, limits, probe_seconds=0.02, probe_timeout=60.0)
    async with router.probing():
        yield Face(build_router(router, keys or ADMIN, limits), router, fakes)
    for fake in fakes.values():
        fake.stop()


def on_a_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """An asynchronous test as a plain one."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(test(*arguments, **named))

    return run


def log_lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that gets what serving logs from now on, wherever a command has sent logs before."""
    lines: list[str] = []
    for level in ("info", "warning"):
        monkeypatch.setattr(
            logging.getLogger("slipstream.serving"),
            level,
            lambda sentence, *parts: lines.append(sentence % parts),
        )
    return lines


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, for a minute at most."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)
