"""The router: reads of a request only whom it is for, sends its bytes to that user's instance, and
the answer's bytes back.

It keeps no state that another router would miss: the order of instances comes from their names, a
diverted user's instance from the ticket. A request whose instance dies goes to the next in order,
unless that could carry out an append twice.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from slipstream.errors import SlipstreamError
from slipstream.serving.http import messages as m
from slipstream.serving.http.endpoints import BACKLOG_HEADER, DEADLINE_HEADER, KEY_HEADER
from slipstream.serving.http.http_app import (
    Gate,
    Handler,
    HttpProblem,
    RequestContext,
    RequestMetrics,
    build,
    problem_body,
    problem_headers,
    problem_of,
    read_body,
    read_deadline,
    send_answer,
)
from slipstream.serving.http.limits import Keys, Limits
from slipstream.serving.router.routing import Member, Routing
from slipstream.serving.router.ticket import TicketOffice, TicketRefused
from slipstream.serving.router.upstream import Answer, Broken, Crowded, NotSent, Upstream

FORWARDED = {
    "/v1/preinfer": "preinfer",
    "/v1/rank": "rank",
    "/v1/recommend": "recommend",
    "/v1/events": "events",
}
PASSED_ON = frozenset({b"content-type", b"retry-after", b"allow"})
ASSUMED_TOKENS = (
    512  # of a request that names a stored user: the router does not look the history up
)
GRACE_SECONDS = 0.05  # the instance's own 504 says more than ours; it gets this long to arrive
SLOW_SECONDS = 0.5  # an answer awaited this long in vain counts against the instance
_BACKLOG = BACKLOG_HEADER.encode()


class _Counted(msgspec.Struct):
    items: msgspec.Raw = msgspec.Raw(b"")

    def tokens(self) -> int:
        return bytes(self.items).count(b",") + 1


class Envelope(msgspec.Struct):
    """The part of a request that decides where it goes; the instance checks the rest."""

    user: m.User
    ticket: m.TicketText | None = None
    history: _Counted | None = None

    def tokens(self) -> int:
        return self.history.tokens() if self.history is not None else ASSUMED_TOKENS


@dataclass(frozen=True)
class RouterSettings:
    """How a router behaves; `instance_key` is what instances expect from it."""

    instance_key: str = ""
    probe_seconds: float = 0.25
    probe_timeout: float = 1.0


class Router:
    """Forwards requests to the members of a routing."""

    def __init__(
        self, routing: Routing, office: TicketOffice, limits: Limits, settings: RouterSettings
    ) -> None:
        self.routing, self._office, self._limits, self._settings = routing, office, limits, settings
        self._upstreams = {member.name: _upstream(member) for member in routing.members}
        key = f"{KEY_HEADER}: {settings.instance_key}\r\n" if settings.instance_key else ""
        self._common = (
            f" HTTP/1.1\r\nhost: instance\r\ncontent-type: application/json\r\n{key}".encode()
        )
        self._decode = msgspec.json.Decoder(Envelope).decode
        self.counts: Counter[str] = Counter()
        self.told: dict[str, m.StatusAnswer] = {}
        self.draining = False
        self._misses: Counter[str] = Counter()

    # Forwarding

    async def forward(self, scope: Scope, receive: Receive) -> Answer:
        """One request on its way: read, choose, send, perhaps try the next."""
        now = time.monotonic()
        deadline = read_deadline(scope, self._limits, now)
        body = await read_body(scope, receive, self._limits)
        path: str = scope["path"]
        owner = None
        if path in FORWARDED:
            envelope = self._decode(body)
            user = envelope.user
            if envelope.ticket is not None:
                owner = self._owner(envelope.ticket, user, path)
            tokens = 0 if path == "/v1/events" else envelope.tokens()
        else:
            user, tokens = path.removeprefix("/v1/users/"), 0
        return await self._send(scope, body, user, tokens, owner, deadline)

    def _owner(self, ticket: str, user: str, path: str) -> str | None:
        """The instance a ticket names. A pre-inference may bring that of an earlier page; expired,
        it says nothing.
        """
        try:
            return self._office.read(ticket, user).instance
        except TicketRefused as refusal:
            if path == "/v1/preinfer" and refusal.code == "ticket_expired":
                return None
            raise

    async def _send(
        self, scope: Scope, body: bytes, user: str, tokens: int, owner: str | None, deadline: float
    ) -> Answer:
        repeatable = scope["path"] != "/v1/events"
        tried: set[str] = set()
        start = f"{scope['method']} ".encode() + _raw_target(scope) + self._common
        while True:
            now = time.monotonic()
            if now >= deadline:
                raise HttpProblem(
                    504, "deadline_passed", "the deadline passed before an instance could answer"
                )
            member = self.routing.choose(user, tokens, now, owner=owner, tried=tried)
            if member is None:
                self.counts["no_instance"] += 1
                raise HttpProblem(
                    503, "unavailable", "no instance is ready; try again soon", retry_after=1.0
                )
            left = deadline - now
            request = b"%s%s: %d\r\ncontent-length: %d\r\n\r\n%s" % (
                start,
                _DEADLINE,
                max(1, left * 1000),
                len(body),
                body,
            )
            try:
                with self.routing.lease(member, tokens, now):
                    answer = await self._upstreams[member.name].request(
                        request, left + GRACE_SECONDS
                    )
            except (NotSent, Broken, Crowded) as error:
                self._note_failure(member, error)
                if isinstance(error, Broken) and not repeatable:
                    raise HttpProblem(
                        502,
                        "instance_failed",
                        "the instance failed; whether the behaviours were stored is not known, "
                        "see `after`",
                    ) from error
            except TimeoutError:
                if left >= SLOW_SECONDS:
                    member.breaker.failed(time.monotonic())
                raise
            else:
                self._note_answer(member, answer)
                if not (answer.status == 503 and member.draining):
                    return answer
            tried.add(member.name)
            self.counts["retries"] += 1

    def _note_failure(self, member: Member, error: Exception) -> None:
        self.counts[type(error).__name__.lower()] += 1
        if isinstance(error, NotSent):
            member.ready = False  # until a probe finds it again
        if not isinstance(error, Crowded):
            member.breaker.failed(time.monotonic())

    def _note_answer(self, member: Member, answer: Answer) -> None:
        member.breaker.succeeded()
        for name, value in answer.headers:
            if name == _BACKLOG:
                member.reported = int(value)
        if answer.status == 503 and b'"draining"' in answer.body:
            member.draining = True

    # Watching the instances

    async def probe(self, member: Member) -> None:
        """Ask an instance how it is, and believe it."""
        request = b"GET /v1/status" + self._common + b"content-length: 0\r\n\r\n"
        try:
            answer = await self._upstreams[member.name].request(
                request, self._settings.probe_timeout
            )
            if answer.status != 200:
                raise Broken
            status = msgspec.json.decode(answer.body, type=m.StatusAnswer)
        except (NotSent, Broken, Crowded, TimeoutError, msgspec.DecodeError) as error:
            self._misses[member.name] += 1
            if isinstance(error, NotSent) or self._misses[member.name] >= 3:
                member.ready = False
            return
        self._misses[member.name] = 0
        if not member.ready:
            member.breaker.succeeded()  # a new process: what the old one did is forgotten
        member.ready, member.draining, member.reported = (
            status.ready or status.draining,
            status.draining,
            status.backlog,
        )
        self.told[member.name] = status

    async def watch(self) -> None:
        """Probe every member for ever, each on its own clock."""

        async def watch_one(member: Member) -> None:
            while True:
                await self.probe(member)
                await asyncio.sleep(self._settings.probe_seconds)

        await asyncio.gather(*(watch_one(member) for member in self.routing.members))

    def close(self) -> None:
        for upstream in self._upstreams.values():
            upstream.close()

    # The router's own endpoints

    def handlers(self) -> dict[str, Handler]:
        return {name: getattr(self, name) for name in ("healthz", "readyz", "drain", "reload")}

    async def healthz(self, _message: None, asked: RequestContext) -> m.HealthAnswer:
        return m.HealthAnswer("ok")

    async def readyz(self, _message: None, asked: RequestContext) -> m.HealthAnswer:
        if self.draining or not any(
            member.usable(time.monotonic()) for member in self.routing.members
        ):
            raise HttpProblem(
                503, "unavailable", "draining" if self.draining else "no instance is ready"
            )
        return m.HealthAnswer("ok")

    async def drain(self, request: m.DrainRequest, asked: RequestContext) -> m.DrainAnswer:
        """Drain one instance by name, or this router: it says that it is not ready, and goes on
        serving what still comes.
        """
        if request.instance is None:
            self.draining = True
            return m.DrainAnswer("router")
        member = self.routing.by_name.get(request.instance)
        if member is None:
            known = ", ".join(sorted(self.routing.by_name))
            raise HttpProblem(
                404, "not_found", f"no instance is called '{request.instance}'; there are {known}"
            )
        await self._command(member, "/admin/drain", b"{}", asked.deadline)
        member.draining = True
        return m.DrainAnswer(member.name)

    async def reload(self, request: m.ReloadRequest, asked: RequestContext) -> m.ReloadAnswer:
        """Every instance in turn opens the bundle again, so that the others serve meanwhile."""
        before: dict[str, str] = {}
        after: dict[str, str] = {}
        for member in self.routing.members:
            answer = await self._command(
                member, "/admin/reload", msgspec.json.encode(request), asked.deadline
            )
            part = msgspec.json.decode(answer.body, type=m.ReloadAnswer)
            before |= part.before
            after |= part.after
        return m.ReloadAnswer(before, after)

    async def _command(self, member: Member, path: str, body: bytes, deadline: float) -> Answer:
        request = (
            f"POST {path}".encode()
            + self._common
            + f"content-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        try:
            answer = await self._upstreams[member.name].request(
                request, max(0.1, deadline - time.monotonic())
            )
        except (NotSent, Broken, Crowded) as error:
            raise HttpProblem(
                502, "instance_failed", f"instance '{member.name}' did not answer"
            ) from error
        if answer.status >= 400:
            problem = msgspec.json.decode(answer.body, type=m.Problem)
            raise HttpProblem(
                answer.status, problem.error, f"instance '{member.name}': {problem.detail}"
            )
        return answer

    def figures(self) -> Mapping[tuple[str, ...], float]:
        """For /metrics: this router's counts, and what every instance told it last."""
        shown: dict[tuple[str, ...], float] = {
            (f"router_{name}",): float(count) for name, count in self.counts.items()
        }
        for member in self.routing.members:
            shown["router_outstanding_tokens", member.name] = member.outstanding
            shown["router_instance_ready", member.name] = float(
                member.ready and not member.draining
            )
            shown["router_breaker_failures", member.name] = member.breaker.failures
        for name, status in self.told.items():
            shown |= {(f"instance_{figure}", name): value for figure, value in status.stats.items()}
        return shown


_DEADLINE = DEADLINE_HEADER.encode()


def _raw_target(scope: Scope) -> bytes:
    target: bytes = scope.get("raw_path") or scope["path"].encode()
    query: bytes = scope["query_string"]
    return target + b"?" + query if query else target


def _upstream(member: Member) -> Upstream:
    place = urlsplit(member.url)
    if place.scheme != "http" or place.hostname is None or place.port is None:
        raise SlipstreamError(
            f"'{member.url}' is not the address of an instance; write it as http://HOST:PORT"
        )
    return Upstream(place.hostname, place.port)


class RouterApp:
    """The ASGI app: forwarded paths by the short way, the rest through Starlette."""

    def __init__(self, router: Router, limits: Limits) -> None:
        self.router = router
        self._meter = RequestMetrics(router.figures, ("instance",))
        self._rest: ASGIApp = build(
            "router", {**router.handlers(), **_unreached()}, limits, self._meter
        )
        self._watching: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        path, method = scope["path"], scope["method"]
        name = (
            FORWARDED.get(path)
            if method == "POST"
            else "user"
            if method == "GET" and _is_user(path)
            else None
        )
        if name is None:
            await self._rest(scope, receive, send)
            return
        started = time.monotonic()
        try:
            answer = await self.router.forward(scope, receive)
            status, body = answer.status, answer.body
            headers = [pair for pair in answer.headers if pair[0] in PASSED_ON]
        except Exception as error:
            problem = problem_of(error)
            status, headers, body = problem.status, problem_headers(problem), problem_body(problem)
        self._meter.count(name, status, time.monotonic() - started)
        await send_answer(send, status, headers, body)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        async with self._watched():
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    @contextlib.asynccontextmanager
    async def _watched(self) -> AsyncIterator[None]:
        members = self.router.routing.members
        for member in members:
            member.ready = False
        await asyncio.gather(*(self.router.probe(member) for member in members))
        watching = asyncio.create_task(self.router.watch())
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            self.router.close()


def _is_user(path: str) -> bool:
    return (
        path.startswith("/v1/users/")
        and "/" not in path[len("/v1/users/") :]
        and len(path) > len("/v1/users/")
    )


def _unreached() -> dict[str, Handler]:
    """Routes for the forwarded paths, so that Starlette answers a wrong method with 405; the right
    one never gets here.
    """

    async def refuse(_message: object, _asked: RequestContext) -> None:
        raise HttpProblem(404, "not_found", "Not Found")

    return dict.fromkeys((*FORWARDED.values(), "user"), refuse)


def build_router(
    members: list[Member],
    office: TicketOffice,
    keys: Keys,
    limits: Limits,
    settings: RouterSettings,
    **routing: float | None,
) -> Gate:
    """The router's app, ready for uvicorn; `routing` are the arguments of `Routing`."""
    router = Router(Routing(members, **routing), office, limits, settings)  # type: ignore[arg-type]
    return Gate(RouterApp(router, limits), keys, limits)
