"""Requests of the page that go on to the servers of models.

`/models/NAME/…` goes to the server of that name, any other path to the first one. Only what a
request needs is passed on: its path, its body, the key and the deadline. Touch this when the page
asks more than one place in another way.
"""

import asyncio
from collections.abc import Mapping

import aiohttp
from starlette.types import Receive, Scope, Send
from yarl import URL

from slipstream.serving.http.endpoints import DEADLINE_HEADER, KEY_HEADER
from slipstream.serving.http.http_app import (
    HttpProblem,
    header,
    problem_body,
    problem_headers,
    problem_of,
    read_body,
    send_answer,
)
from slipstream.serving.http.limits import Limits

PREFIX = "/models/"
FORWARDED = ("/v1/", "/admin/", "/healthz", "/readyz", "/metrics", "/openapi.json")
PASSED_ON = ("content-type", KEY_HEADER, DEADLINE_HEADER)
RETURNED = ("content-type", "retry-after", "allow")
MOST_BYTES = 64 << 20  # of an answer
SECONDS = 65.0
CONNECTIONS = 64


class ModelProxy:
    """The servers of models behind the page, by name."""

    def __init__(self, urls: Mapping[str, str]) -> None:
        self._urls, self._limits = dict(urls), Limits()
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on and send the answer back."""
        try:
            target = self._target(scope)
            body = await read_body(scope, receive, self._limits)
            status, headers, answer = await self._ask(scope, target, body)
        except Exception as error:
            problem = problem_of(error)
            status, headers = problem.status, problem_headers(problem)
            answer = problem_body(problem)
        await send_answer(send, status, headers, answer)

    def _target(self, scope: Scope) -> URL:
        """Return where a request goes; the path stays as it was encoded."""
        path = (scope.get("raw_path") or scope["path"].encode()).decode("ascii")
        name = next(iter(self._urls), None)
        if path.startswith(PREFIX):
            name, slash, rest = path.removeprefix(PREFIX).partition("/")
            path = slash + rest
        if name not in self._urls or not path.startswith(FORWARDED):
            raise HttpProblem(404, "not_found", "nothing is served here under this path")
        query = scope["query_string"].decode("ascii")
        return URL(self._urls[name] + path + (f"?{query}" if query else ""), encoded=True)

    async def _ask(
        self, scope: Scope, target: URL, body: bytes
    ) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        given = {name: header(scope, name.encode()) for name in PASSED_ON}
        headers = {name: value.decode("latin-1") for name, value in given.items() if value}
        try:
            async with self._open().request(
                scope["method"], target, data=body or None, headers=headers, allow_redirects=False
            ) as answer:
                content = await answer.content.read(MOST_BYTES)
                told = [
                    (name.encode(), answer.headers[name].encode("latin-1"))
                    for name in RETURNED
                    if name in answer.headers
                ]
                return answer.status, told, content
        except (aiohttp.ClientError, TimeoutError) as error:
            raise HttpProblem(
                502, "unreachable", "the server of this model does not answer; is it running?"
            ) from error

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=CONNECTIONS),
                timeout=aiohttp.ClientTimeout(total=SECONDS),
                auto_decompress=False,
            )
        return self._session

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            await asyncio.sleep(0)
