"""Requests to an ASGI app without a server, for the tests of the apps."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import quote


class Answer(NamedTuple):
    """An app's answer; `content` is the decoded JSON, or text."""

    status: int
    content: Any
    headers: dict[str, str]


async def ask(
    app: Any,
    method: str,
    path: str,
    body: bytes | Sequence[bytes] = b"",
    *,
    query: str = "",
    **headers: str,
) -> Answer:
    """Send one request and return the answer; a body may come in parts, none: the client goes."""
    parts = [body] if isinstance(body, bytes) else list(body)
    complete = bool(parts)
    sent: list[dict[str, Any]] = []
    sent_as = {"content-type": "application/json", "host": "localhost"}
    names = {**sent_as, **{name.replace("_", "-"): value for name, value in headers.items()}}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": quote(path).encode(),
        "query_string": query.encode(),
        "root_path": "",
        "scheme": "http",
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "headers": [(name.encode(), value.encode()) for name, value in names.items()],
    }

    async def receive() -> dict[str, Any]:
        if not parts and complete:
            await asyncio.Event().wait()  # the client stays for its answer
        if not parts:
            return {"type": "http.disconnect"}
        part = parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(parts)}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    start, *rest = sent
    content = b"".join(message.get("body", b"") for message in rest)
    found = {name.decode(): value.decode() for name, value in start["headers"]}
    is_json = found.get("content-type", "").startswith("application/json")
    return Answer(start["status"], json.loads(content) if is_json else content.decode(), found)
