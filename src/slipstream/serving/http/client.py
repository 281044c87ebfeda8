"""A client: the endpoints as methods, over connections that are kept open.

`AsyncClient` is for services, `Client` for scripts and notebooks.

    client = Client("http://127.0.0.1:8000")
    ticket = client.preinfer("ann").ticket            # early, if client.worth_announcing(1_500)
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
from slipstream.serving.http import explore_messages as em
from slipstream.serving.http import messages as m
from slipstream.serving.http import version_messages as vm
from slipstream.serving.http.announcements import Announcements
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
        self._announcements = Announcements()
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
        request = m.PreinferRequest(user, history, **more)
        answer = await self._post("/v1/preinfer", request, m.PreinferAnswer)
        self._announcements.note(answer)
        return answer

    def worth_announcing(self, behaviours: int) -> bool:
        """Return whether a history of this length gains by `preinfer`, as the server last said."""
        return self._announcements.worth(behaviours)

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
        """Append behaviours to a user's stored history, of now where no times are given.

        `preinfer=Announcement(rank_in_ms=…)` announces the ranking that follows as well.
        """
        request = m.EventsRequest(user, list(items), timestamps, **more)
        answer = await self._post("/v1/events", request, m.EventsAnswer)
        if answer.preinfer is not None:
            self._announcements.note(answer.preinfer)
        return answer

    async def user(self, user: str, limit: int = 20) -> m.UserAnswer:
        """Read what is stored of a user, at most `limit` behaviours."""
        return await self._ask("GET", f"{_user_path(user)}?limit={limit}", b"", m.UserAnswer)

    async def export(self, user: str) -> m.UserAnswer:
        """Read everything that is stored of a user."""
        return await self._ask("GET", f"/v1/export/{quote(user, safe='')}", b"", m.UserAnswer)

    async def delete(self, user: str) -> m.DeleteAnswer:
        """Delete what is stored of a user."""
        return await self._ask("DELETE", _user_path(user), b"", m.DeleteAnswer)

    async def users(self, limit: int = 20, after: str | None = None) -> em.UsersAnswer:
        """List users of the history store, those after `after`."""
        more = "" if after is None else f"&after={quote(after, safe='')}"
        return await self._ask("GET", f"/v1/users?limit={limit}{more}", b"", em.UsersAnswer)

    async def model(self) -> em.ModelAnswer:
        """Say what is served."""
        return await self._ask("GET", "/v1/model", b"", em.ModelAnswer)

    async def items(self, items: Sequence[m.Identity], show: Sequence[str] = ()) -> em.ItemsAnswer:
        """Look items up by id: titles and features."""
        return await self._post(
            "/v1/items", em.ItemsRequest(list(items), list(show)), em.ItemsAnswer
        )

    async def search(self, query: str, count: int = 20, **more: Any) -> em.ItemsAnswer:
        """Find items by title or id."""
        return await self._post(
            "/v1/search", em.SearchRequest(query, count, **more), em.ItemsAnswer
        )

    async def neighbours(self, item: m.Identity, count: int = 10, **more: Any) -> em.ItemsAnswer:
        """Find the items whose vectors are nearest."""
        return await self._post(
            "/v1/neighbours", em.NeighboursRequest(item, count, **more), em.ItemsAnswer
        )

    async def explain(self, user: str, item: m.Identity, **more: Any) -> em.ExplainAnswer:
        """Measure what each behaviour adds to the score of an item."""
        return await self._post(
            "/v1/explain", em.ExplainRequest(user, item, **more), em.ExplainAnswer
        )

    async def drain(self, instance: str | None = None) -> m.DrainAnswer:
        """Drain an instance, or the router itself."""
        return await self._post("/admin/drain", m.DrainRequest(instance), m.DrainAnswer)

    async def undrain(self, instance: str | None = None) -> m.UndrainAnswer:
        """Take a drained instance, or the router itself, back into service."""
        return await self._post("/admin/undrain", m.DrainRequest(instance), m.UndrainAnswer)

    async def fleet(self) -> em.FleetAnswer:
        """Tell the state of every instance behind a router."""
        return await self._ask("GET", "/v1/fleet", b"", em.FleetAnswer)

    async def kill(self, instance: str) -> em.KillAnswer:
        """Kill an instance as a crash would, where the server permits it."""
        return await self._post("/admin/kill", em.KillRequest(instance), em.KillAnswer)

    async def traffic(
        self, share: float | None = None, shadow: float | None = None
    ) -> m.ReloadAnswer:
        """Change the candidate's shares; a share of 1 makes it the stable version."""
        return await self._post("/admin/traffic", vm.TrafficRequest(share, shadow), m.ReloadAnswer)

    async def rollback(self) -> m.ReloadAnswer:
        """Drop the candidate; without one, serve the version before."""
        return await self._post("/admin/rollback", vm.RollbackRequest(), m.ReloadAnswer)

    async def versions(self) -> vm.VersionsAnswer:
        """Show what every instance serves."""
        return await self._ask("GET", "/admin/versions", b"", vm.VersionsAnswer)

    async def reload(
        self, version: str | None = None, share: float = 1.0, shadow: float = 0.0
    ) -> m.ReloadAnswer:
        """Let every instance open its bundle again."""
        return await self._post(
            "/admin/reload", m.ReloadRequest(version, share, shadow), m.ReloadAnswer
        )

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

    def worth_announcing(self, behaviours: int) -> bool:
        """Return whether a history of this length gains by `preinfer`, as the server last said."""
        return self._client.worth_announcing(behaviours)

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

    def export(self, user: str) -> m.UserAnswer:
        """Read everything that is stored of a user."""
        return self._run(self._client.export(user))

    def delete(self, user: str) -> m.DeleteAnswer:
        """Delete what is stored of a user."""
        return self._run(self._client.delete(user))

    def users(self, limit: int = 20, after: str | None = None) -> em.UsersAnswer:
        """List users of the history store, those after `after`."""
        return self._run(self._client.users(limit, after))

    def model(self) -> em.ModelAnswer:
        """Say what is served."""
        return self._run(self._client.model())

    def items(self, items: Sequence[m.Identity], show: Sequence[str] = ()) -> em.ItemsAnswer:
        """Look items up by id: titles and features."""
        return self._run(self._client.items(items, show))

    def search(self, query: str, count: int = 20, **more: Any) -> em.ItemsAnswer:
        """Find items by title or id."""
        return self._run(self._client.search(query, count, **more))

    def neighbours(self, item: m.Identity, count: int = 10, **more: Any) -> em.ItemsAnswer:
        """Find the items whose vectors are nearest."""
        return self._run(self._client.neighbours(item, count, **more))

    def explain(self, user: str, item: m.Identity, **more: Any) -> em.ExplainAnswer:
        """Measure what each behaviour adds to the score of an item."""
        return self._run(self._client.explain(user, item, **more))

    def drain(self, instance: str | None = None) -> m.DrainAnswer:
        """Drain an instance, or the router itself."""
        return self._run(self._client.drain(instance))

    def undrain(self, instance: str | None = None) -> m.UndrainAnswer:
        """Take a drained instance, or the router itself, back into service."""
        return self._run(self._client.undrain(instance))

    def fleet(self) -> em.FleetAnswer:
        """Tell the state of every instance behind a router."""
        return self._run(self._client.fleet())

    def kill(self, instance: str) -> em.KillAnswer:
        """Kill an instance as a crash would, where the server permits it."""
        return self._run(self._client.kill(instance))

    def traffic(self, share: float | None = None, shadow: float | None = None) -> m.ReloadAnswer:
        """Change the candidate's shares; a share of 1 makes it the stable version."""
        return self._run(self._client.traffic(share, shadow))

    def rollback(self) -> m.ReloadAnswer:
        """Drop the candidate; without one, serve the version before."""
        return self._run(self._client.rollback())

    def versions(self) -> vm.VersionsAnswer:
        """Show what every instance serves."""
        return self._run(self._client.versions())

    def reload(
        self, version: str | None = None, share: float = 1.0, shadow: float = 0.0
    ) -> m.ReloadAnswer:
        """Let every instance open its bundle again."""
        return self._run(self._client.reload(version, share, shadow))

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
