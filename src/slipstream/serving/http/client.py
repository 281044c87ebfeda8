"""A client: the endpoints as methods, over connections that are kept open.

`AsyncClient` is for services, `Client` for scripts and notebooks.

    client = Client("http://127.0.0.1:8000")
    ticket = client.preinfer("ann").ticket            # early
    answer = client.rank("ann", [1, 2, 3], ticket=ticket)

Touch this when an endpoint is added or changes.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec
from yarl import URL

from slipstream.errors import SlipstreamError
from slipstream.serving.http import messages as m
from slipstream.serving.http.endpoints import DEADLINE_HEADER, KEY_HEADER

Message = TypeVar("Message")


class RefusalError(SlipstreamError):
    """The server refused: `status`, `code` for programs, `detail` for people."""

    def __init__(self, status: int, code: str, detail: str) -> None:
        super().__init__(f"{detail} ({status} {code})")
        self.status, self.code, self.detail = status, code, detail


class UnreachableError(SlipstreamError):
    """No answer: the server is not there, or the connection ended."""


class AsyncClient:
    """Calls one server (a router, or a single instance). Use `async with`."""

    def __init__(
        self,
        url: str,
        key: str | None = None,
        deadline_ms: float | None = None,
        connections: int = 100,
    ) -> None:
        self._url = url.rstrip("/")
        headers = {"content-type": "application/json"}
        if key:
            headers[KEY_HEADER] = key
        if deadline_ms is not None:
            headers[DEADLINE_HEADER] = f"{deadline_ms:g}"
        seconds = 65.0 if deadline_ms is None else deadline_ms / 1000 + 2.0
        self._session = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=connections),
            timeout=aiohttp.ClientTimeout(total=seconds),
        )

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_failure: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def preinfer(
        self, user: str, history: m.HistoryMessage | None = None, **more: Any
    ) -> m.PreinferAnswer:
        """Announce that this user will be ranked soon; the answer has the ticket."""
        return await self._post(
            "/v1/preinfer", m.PreinferRequest(user, history, **more), m.PreinferAnswer
        )

    async def rank(
        self,
        user: str,
        candidates: Sequence[m.Identity],
        history: m.HistoryMessage | None = None,
        **more: Any,
    ) -> m.RankAnswer:
        """Score candidates for a user."""
        return await self._post(
            "/v1/rank", m.RankRequest(user, list(candidates), history, **more), m.RankAnswer
        )

    async def recommend(self, user: str, count: int = 10, **more: Any) -> m.RecommendAnswer:
        """Retrieve, filter and rank; the best `count` items."""
        return await self._post(
            "/v1/recommend", m.RecommendRequest(user, count, **more), m.RecommendAnswer
        )

    async def events(
        self,
        user: str,
        items: Sequence[m.Identity],
        timestamps: list[int] | None = None,
        **more: Any,
    ) -> m.EventsAnswer:
        """Append behaviours to a user's stored history, of now where no times are given."""
        return await self._post(
            "/v1/events", m.EventsRequest(user, list(items), timestamps, **more), m.EventsAnswer
        )

    async def user(self, user: str, limit: int = 20) -> m.UserAnswer:
        """Read what is stored of a user, at most `limit` behaviours."""
        return await self._ask("GET", f"{_user_path(user)}?limit={limit}", b"", m.UserAnswer)

    async def delete(self, user: str) -> m.DeleteAnswer:
        """Delete what is stored of a user."""
        return await self._ask("DELETE", _user_path(user), b"", m.DeleteAnswer)

    async def drain(self, instance: str | None = None) -> m.DrainAnswer:
        """Drain an instance, or the router itself."""
        return await self._post("/admin/drain", m.DrainRequest(instance), m.DrainAnswer)

    async def reload(self, version: str | None = None) -> m.ReloadAnswer:
        """Let every instance open its bundle again."""
        return await self._post("/admin/reload", m.ReloadRequest(version), m.ReloadAnswer)

    async def metrics(self) -> str:
        """The metrics in Prometheus' text format."""
        status, body = await self._raw("GET", "/metrics", b"")
        if status != 200:
            raise _refusal(status, body)
        return body.decode()

    async def _post(self, path: str, message: msgspec.Struct, kind: type[Message]) -> Message:
        return await self._ask("POST", path, msgspec.json.encode(message), kind)

    async def _ask(self, method: str, path: str, body: bytes, kind: type[Message]) -> Message:
        status, content = await self._raw(method, path, body)
        if status >= 300:
            raise _refusal(status, content)
        return msgspec.json.decode(content, type=kind)

    async def _raw(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        try:
            # as it is: a user called ".." is not a step up
            url = URL(self._url + path, encoded=True)
            async with self._session.request(method, url, data=body or None) as answer:
                return answer.status, await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            why = str(error) or type(error).__name__
            raise UnreachableError(
                f"no answer from {self._url} ({why}); is `slipstream serve` running there?"
            ) from error


def _user_path(user: str) -> str:
    return f"/v1/users/{quote(user, safe='')}"


def _refusal(status: int, body: bytes) -> RefusalError:
    try:
        problem = msgspec.json.decode(body, type=m.Problem)
    except msgspec.DecodeError:
        problem = m.Problem("unknown", body[:200].decode("utf-8", "replace"))
    return RefusalError(status, problem.error, problem.detail)


class Client:
    """The same calls without `await`, for scripts and notebooks; one thread at a time."""

    def __init__(self, url: str, key: str | None = None, deadline_ms: float | None = None) -> None:
        self._runner = asyncio.Runner()
        self._client = self._runner.run(_open_client(url, key, deadline_ms))

    def preinfer(
        self, user: str, history: m.HistoryMessage | None = None, **more: Any
    ) -> m.PreinferAnswer:
        """Announce that this user will be ranked soon; the answer has the ticket."""
        return self._run(self._client.preinfer(user, history, **more))

    def rank(
        self,
        user: str,
        candidates: Sequence[m.Identity],
        history: m.HistoryMessage | None = None,
        **more: Any,
    ) -> m.RankAnswer:
        """Score candidates for a user."""
        return self._run(self._client.rank(user, candidates, history, **more))

    def recommend(self, user: str, count: int = 10, **more: Any) -> m.RecommendAnswer:
        """Retrieve, filter and rank; the best `count` items."""
        return self._run(self._client.recommend(user, count, **more))

    def events(
        self,
        user: str,
        items: Sequence[m.Identity],
        timestamps: list[int] | None = None,
        **more: Any,
    ) -> m.EventsAnswer:
        """Append behaviours to a user's stored history, of now where no times are given."""
        return self._run(self._client.events(user, items, timestamps, **more))

    def user(self, user: str, limit: int = 20) -> m.UserAnswer:
        """Read what is stored of a user, at most `limit` behaviours."""
        return self._run(self._client.user(user, limit))

    def delete(self, user: str) -> m.DeleteAnswer:
        """Delete what is stored of a user."""
        return self._run(self._client.delete(user))

    def drain(self, instance: str | None = None) -> m.DrainAnswer:
        """Drain an instance, or the router itself."""
        return self._run(self._client.drain(instance))

    def reload(self, version: str | None = None) -> m.ReloadAnswer:
        """Let every instance open its bundle again."""
        return self._run(self._client.reload(version))

    def metrics(self) -> str:
        """The metrics in Prometheus' text format."""
        return self._run(self._client.metrics())

    def close(self) -> None:
        """Close all connections."""
        self._run(self._client.close())
        self._runner.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_failure: object) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, Message]) -> Message:
        return self._runner.run(work)


async def _open_client(url: str, key: str | None, deadline_ms: float | None) -> AsyncClient:
    return AsyncClient(url, key, deadline_ms)
