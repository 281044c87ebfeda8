"""The page's process: own endpoints, requests that go on to a model's server, and refusals."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.ui import page_directory
from slipstream.ui.page_server import PageSettings, build_page
from tests.support.run_notes import write_note


async def ask(
    app: Any, path: str, method: str = "GET", body: bytes = b"", query: str = "", **headers: str
) -> tuple[int, Any]:
    """One request to an ASGI app; JSON answers are decoded."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = {"host": "127.0.0.1:8000", "content-type": "application/json", **headers}
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()],
        "client": ("127.0.0.1", 1),
    }
    await app(scope, receive, send)
    content = b"".join(message.get("body", b"") for message in sent[1:])
    is_json = (b"content-type", b"application/json") in sent[0]["headers"]
    return sent[0]["status"], json.loads(content) if is_json else content


async def end(app: Any) -> None:
    """End an app as its server would."""
    messages = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])

    async def receive() -> dict[str, Any]:
        return next(messages)

    async def send(_message: Any) -> None:
        pass

    await app({"type": "lifespan"}, receive, send)


@contextlib.asynccontextmanager
async def echo() -> AsyncIterator[tuple[str, list[str]]]:
    """A server that answers every request with 200 and keeps what it was sent."""
    seen: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = [line for line in head.lower().splitlines() if "content-length" in line]
                body = await reader.readexactly(int(length[0].split(":")[1]) if length else 0)
                seen.append(head + body.decode())
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n"
                    b"\r\n{}"
                )
                await writer.drain()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", seen
    finally:
        server.close()


def run(work: Any) -> None:
    asyncio.run(asyncio.wait_for(work, 30))


def test_the_page_and_what_it_can_show_are_served(tmp_path: Path):
    write_note(tmp_path / "first")

    async def work() -> None:
        app = build_page(
            PageSettings(models={"a b": "http://x", "c": "http://y"}, runs=str(tmp_path))
        )
        status, content = await ask(app, "/")
        assert (status, content) == (200, (page_directory() / "index.html").read_bytes())
        told = (await ask(app, "/v1/page"))[1]
        assert told["models"] == [
            {"name": "a b", "base": ""},
            {"name": "c", "base": "/models/c"},
        ]
        assert told["runs"] is True
        assert [row["run"] for row in (await ask(app, "/v1/runs"))[1]["runs"]] == ["first"]
        assert (await ask(app, "/v1/run", query="run=first"))[0] == 200
        for query in ("run=../x", "run=", "runs=first", "run=first&steps=0"):
            assert (await ask(app, "/v1/trace", query=query))[0] in (400, 503)

    run(work())


def test_requests_go_to_the_model_they_name_with_key_and_deadline_and_nothing_else():
    async def work() -> None:
        async with echo() as (url, seen), echo() as (other, seen_by_other):
            app = build_page(PageSettings(models={"one": url, "two": other}))
            status, answer = await ask(
                app,
                "/v1/users/a%2Fb",
                query="limit=3",
                x_api_key="secret",
                x_slipstream_deadline_ms="50",
                cookie="mine",
            )
            assert (status, answer) == (200, {})
            assert "GET /v1/users/a%2Fb?limit=3 " in seen[0]
            assert "x-api-key: secret" in seen[0] and "x-slipstream-deadline-ms: 50" in seen[0]
            assert "mine" not in seen[0]
            await ask(app, "/models/two/v1/rank", "POST", b'{"user": "ann"}')
            assert "POST /v1/rank " in seen_by_other[0]
            assert seen_by_other[0].endswith('{"user": "ann"}') and len(seen) == 1
            await end(app)

    run(work())


@pytest.mark.parametrize("path", ["/models/three/v1/rank", "/etc/passwd", "/models/one/../x"])
def test_other_paths_lead_nowhere(path: str):
    async def work() -> None:
        app = build_page(PageSettings(models={"one": "http://127.0.0.1:9"}))
        assert (await ask(app, path))[0] == 404

    run(work())


def test_a_server_that_is_gone_and_a_page_without_runs_are_told():
    async def work() -> None:
        app = build_page(PageSettings(models={"one": "http://127.0.0.1:9"}))
        status, problem = await ask(app, "/v1/model")
        assert status == 502 and "is it running?" in problem["detail"]
        status, problem = await ask(app, "/v1/runs")
        assert status == 404 and "slipstream ui RUNS" in problem["detail"]
        await end(app)

    run(work())
