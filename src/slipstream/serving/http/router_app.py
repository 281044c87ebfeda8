"""The router's app: it sends each request to its user's instance, and the answer's bytes back.

Of a request it reads only the user, the ticket and the length of the history. It keeps no state
that another router would need: the order of the instances comes from their names, the instance of a
user's prefix from the ticket. When an instance fails, the request goes to the next in order, unless
that could append behaviours twice. Touch this when forwarding, retries or probes change; the choice
of the instance is in router/balancer.py.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from urllib.parse import urlsplit

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from slipstream.errors import SlipstreamError
from slipstream.serving.http import messages as m
from slipstream.serving.http.endpoints import (
    BACKLOG_HEADER,
    DEADLINE_HEADER,
    ENDPOINTS,
    KEY_HEADER,
    no_body,
)
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
from slipstream.serving.router.balancer import InstanceState, LoadBalancer
from slipstream.serving.router.ticket import TicketError, TicketSigner
from slipstream.serving.router.upstream import (
    ConnectError,
    ConnectionLostError,
    PoolFullError,
    Upstream,
    UpstreamAnswer,
    UpstreamError,
)

FORWARDED = {
    endpoint.path: endpoint
    for endpoint in ENDPOINTS
    if endpoint.name in ("preinfer", "rank", "recommend", "events")
}
USERS = "/v1/users/"
OF_A_USER = {"GET": "user", "DELETE": "delete"}
PASSED_ON = frozenset({b"content-type", b"retry-after", b"allow"})
ASSUMED_TOKENS = 512  # of a request without a history: the router does not look up stored users
GRACE_SECONDS = 0.05  # after the deadline, for the instance's own 504 with its reason
SLOW_SECONDS = 0.5  # an instance that does not answer for this long counts as failing
MAX_MISSED_PROBES = 3  # in a row; then an instance counts as not ready
_BACKLOG, _DEADLINE = BACKLOG_HEADER.encode(), DEADLINE_HEADER.encode()


class HistoryLength(msgspec.Struct):
    """The number of items in a history; nothing else of it is decoded."""

    items: msgspec.Raw = msgspec.Raw(b"")

    def tokens(self) -> int:
        """The number of items."""
        return bytes(self.items).count(b",") + 1


class RoutingFields(msgspec.Struct):
    """The fields of a request that decide where it goes; the instance checks all others."""

    user: m.User
    ticket: m.TicketText | None = None
    history: HistoryLength | None = None

    def tokens(self) -> int:
        """The tokens of the request, an estimate."""
        return self.history.tokens() if self.history is not None else ASSUMED_TOKENS


class Router:
    """Forwards requests to the instances of a load balancer, and probes these instances."""

    def __init__(
        self,
        balancer: LoadBalancer,
        signer: TicketSigner,
        limits: Limits,
        *,
        instance_key: str = "",
        probe_seconds: float = 0.25,
        probe_timeout: float = 1.0,
    ) -> None:
        self.balancer, self._signer, self._limits = balancer, signer, limits
        self._probe_seconds, self._probe_timeout = probe_seconds, probe_timeout
        self._upstreams = {i.name: _open_upstream(i) for i in balancer.instances}
        key = f"{KEY_HEADER}: {instance_key}\r\n" if instance_key else ""
        self._common = (
            f" HTTP/1.1\r\nhost: instance\r\ncontent-type: application/json\r\n{key}".encode()
        )
        self._decode = msgspec.json.Decoder(RoutingFields).decode
        self.counts: Counter[str] = Counter()
        self.statuses: dict[str, m.StatusAnswer] = {}  # of each instance, as last probed
        self.draining = False
        self._missed_probes: Counter[str] = Counter()

    # Forwarding

    async def forward(self, scope: Scope, receive: Receive) -> UpstreamAnswer:
        """Forward one request: read it, choose an instance, send it, try the next on failure."""
        now = time.monotonic()
        deadline = read_deadline(scope, self._limits, now)
        body = await read_body(scope, receive, self._limits)
        path: str = scope["path"]
        owner = None
        if path in FORWARDED:
            if not body:
                raise HttpProblem(400, "bad_request", no_body(FORWARDED[path]))
            fields = self._decode(body)
            user = fields.user
            if fields.ticket is not None:
                owner = self._owner(fields.ticket, user, path)
            tokens = 0 if path == "/v1/events" else fields.tokens()
        else:
            user, tokens = path.removeprefix(USERS), 0
        return await self._send(scope, body, user, tokens, owner, deadline)

    def _owner(self, ticket: str, user: str, path: str) -> str | None:
        """The instance a ticket names; None for an expired one that a pre-inference brings."""
        try:
            return self._signer.read(ticket, user).instance
        except TicketError as error:
            if path == "/v1/preinfer" and error.code == "ticket_expired":
                return None
            raise

    async def _send(
        self, scope: Scope, body: bytes, user: str, tokens: int, owner: str | None, deadline: float
    ) -> UpstreamAnswer:
        """Send a request to one instance after another until one answers."""
        repeatable = scope["path"] != "/v1/events"
        start = f"{scope['method']} ".encode() + _raw_target(scope) + self._common
        tried: set[str] = set()
        while True:
            now = time.monotonic()
            if now >= deadline:
                raise HttpProblem(
                    504, "deadline_passed", "the deadline passed before an instance could answer"
                )
            instance = self.balancer.choose(user, tokens, now, owner=owner, tried=tried)
            if instance is None:
                self.counts["no_instance"] += 1
                raise HttpProblem(
                    503, "unavailable", "no instance is ready; try again soon", retry_after=1.0
                )
            try:
                with self.balancer.outstanding(instance, tokens, now):
                    answer = await self._try(instance, start, body, deadline - now)
            except UpstreamError as error:
                if isinstance(error, ConnectionLostError) and not repeatable:
                    raise HttpProblem(
                        502,
                        "instance_failed",
                        "the instance failed; whether the behaviours were stored is not known, "
                        "see `after`",
                    ) from error
            else:
                if not (answer.status == 503 and instance.draining):
                    return answer
            tried.add(instance.name)
            self.counts["retries"] += 1

    async def _try(
        self, instance: InstanceState, start: bytes, body: bytes, left: float
    ) -> UpstreamAnswer:
        """Send a request to one instance, `left` seconds before its deadline; note the outcome."""
        head = b"%s: %d\r\ncontent-length: %d\r\n\r\n" % (
            _DEADLINE,
            max(1, left * 1000),
            len(body),
        )
        upstream = self._upstreams[instance.name]
        try:
            answer = await upstream.request(start + head + body, left + GRACE_SECONDS)
        except UpstreamError as error:
            self._note_failure(instance, error)
            raise
        except TimeoutError:
            if left >= SLOW_SECONDS:
                instance.breaker.note_failure(time.monotonic())
            raise
        self._note_answer(instance, answer)
        return answer

    def _note_failure(self, instance: InstanceState, error: UpstreamError) -> None:
        self.counts[error.counter] += 1
        if isinstance(error, ConnectError):
            instance.ready = False  # until a probe finds it again
        if not isinstance(error, PoolFullError):
            instance.breaker.note_failure(time.monotonic())

    def _note_answer(self, instance: InstanceState, answer: UpstreamAnswer) -> None:
        instance.breaker.note_success()
        for name, value in answer.headers:
            if name == _BACKLOG:
                instance.reported = int(value)
        if answer.status == 503 and b'"draining"' in answer.body:
            instance.draining = True

    # Watching the instances

    async def probe(self, instance: InstanceState) -> None:
        """Ask an instance for its status and keep the answer."""
        request = b"GET /v1/status" + self._common + b"content-length: 0\r\n\r\n"
        name = instance.name
        try:
            answer = await self._upstreams[name].request(request, self._probe_timeout)
            if answer.status != 200:
                raise ConnectionLostError
            status = msgspec.json.decode(answer.body, type=m.StatusAnswer)
        except (UpstreamError, TimeoutError, msgspec.DecodeError) as error:
            self._missed_probes[name] += 1
            if isinstance(error, ConnectError) or self._missed_probes[name] >= MAX_MISSED_PROBES:
                instance.ready = False
            return
        self._missed_probes[name] = 0
        if not instance.ready:
            instance.breaker.note_success()  # a new process: the old one's failures do not count
        instance.ready = status.ready or status.draining
        instance.draining, instance.reported = status.draining, status.backlog
        self.statuses[name] = status

    @contextlib.asynccontextmanager
    async def probing(self) -> AsyncIterator[None]:
        """Probe every instance once, then again and again until the block ends."""

        async def probe_forever(instance: InstanceState) -> None:
            while True:
                await asyncio.sleep(self._probe_seconds)
                await self.probe(instance)

        for instance in self.balancer.instances:
            instance.ready = False
        await asyncio.gather(*map(self.probe, self.balancer.instances))
        tasks = [asyncio.create_task(probe_forever(i)) for i in self.balancer.instances]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.close()

    def close(self) -> None:
        """Close the idle connections to the instances."""
        for upstream in self._upstreams.values():
            upstream.close()

    # The router's own endpoints

    def handlers(self) -> dict[str, Handler]:
        """The endpoints that the router answers itself, by name."""
        return {name: getattr(self, name) for name in ("healthz", "readyz", "drain", "reload")}

    async def healthz(self, _message: None, context: RequestContext) -> m.HealthAnswer:
        """Whether the process is alive."""
        return m.HealthAnswer("ok")

    async def readyz(self, _message: None, context: RequestContext) -> m.HealthAnswer:
        """Whether the router takes requests: it is not draining, and an instance is usable."""
        now = time.monotonic()
        if self.draining or not any(i.usable(now) for i in self.balancer.instances):
            raise HttpProblem(
                503, "unavailable", "draining" if self.draining else "no instance is ready"
            )
        return m.HealthAnswer("ok")

    async def drain(self, request: m.DrainRequest, context: RequestContext) -> m.DrainAnswer:
        """Drain one instance by name, or this router.

        A draining router is not ready, but it serves the requests that still come.
        """
        if request.instance is None:
            self.draining = True
            return m.DrainAnswer("router")
        instance = self.balancer.by_name.get(request.instance)
        if instance is None:
            known = ", ".join(sorted(self.balancer.by_name))
            raise HttpProblem(
                404, "not_found", f"no instance is called '{request.instance}'; there are {known}"
            )
        await self._command(instance, "/admin/drain", b"{}", context.deadline)
        instance.draining = True
        return m.DrainAnswer(instance.name)

    async def reload(self, request: m.ReloadRequest, context: RequestContext) -> m.ReloadAnswer:
        """Let the instances open the bundle again, one at a time: the others serve meanwhile."""
        body = msgspec.json.encode(request)
        total = m.ReloadAnswer({}, {})
        for instance in self.balancer.instances:
            answer = await self._command(instance, "/admin/reload", body, context.deadline)
            part = msgspec.json.decode(answer.body, type=m.ReloadAnswer)
            total.before |= part.before
            total.after |= part.after
        return total

    async def _command(
        self, instance: InstanceState, path: str, body: bytes, deadline: float
    ) -> UpstreamAnswer:
        """Send an admin request to one instance; its refusal is raised as the router's own."""
        length = f"content-length: {len(body)}\r\n\r\n".encode()
        request = f"POST {path}".encode() + self._common + length + body
        left = max(0.1, deadline - time.monotonic())
        try:
            answer = await self._upstreams[instance.name].request(request, left)
        except UpstreamError as error:
            raise HttpProblem(
                502, "instance_failed", f"instance '{instance.name}' did not answer"
            ) from error
        if answer.status >= 400:
            problem = msgspec.json.decode(answer.body, type=m.Problem)
            raise HttpProblem(
                answer.status, problem.error, f"instance '{instance.name}': {problem.detail}"
            )
        return answer

    def figures(self) -> Mapping[tuple[str, ...], float]:
        """The router's counts and the last status of every instance, for /metrics."""
        found: dict[tuple[str, ...], float] = {
            (f"router_{name}",): float(count) for name, count in self.counts.items()
        }
        for instance in self.balancer.instances:
            name, ready = instance.name, instance.ready and not instance.draining
            found["router_outstanding_tokens", name] = instance.outstanding
            found["router_instance_ready", name] = float(ready)
            found["router_breaker_failures", name] = instance.breaker.failures
        for name, status in self.statuses.items():
            found |= {(f"instance_{figure}", name): value for figure, value in status.stats.items()}
        return found


def _raw_target(scope: Scope) -> bytes:
    target: bytes = scope.get("raw_path") or scope["path"].encode()
    query: bytes = scope["query_string"]
    return target + b"?" + query if query else target


def _open_upstream(instance: InstanceState) -> Upstream:
    address = urlsplit(instance.url)
    if address.scheme != "http" or address.hostname is None or address.port is None:
        raise SlipstreamError(
            f"'{instance.url}' is not the address of an instance; write it as http://HOST:PORT"
        )
    return Upstream(address.hostname, address.port)


class RouterApp:
    """The ASGI app: it forwards some paths itself and leaves the others to Starlette."""

    def __init__(self, router: Router, limits: Limits) -> None:
        self.router = router
        self._metrics = RequestMetrics(router.figures, ("instance",))
        self._others: ASGIApp = build(
            "router", {**router.handlers(), **_forwarded_handlers()}, limits, self._metrics
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        name = _forwarded_name(scope["method"], scope["path"])
        if name is None:
            await self._others(scope, receive, send)
            return
        started = time.monotonic()
        try:
            answer = await self.router.forward(scope, receive)
            status, body = answer.status, answer.body
            headers = [pair for pair in answer.headers if pair[0] in PASSED_ON]
        except Exception as error:
            problem = problem_of(error)
            status, headers, body = problem.status, problem_headers(problem), problem_body(problem)
        self._metrics.count(name, status, time.monotonic() - started)
        await send_answer(send, status, headers, body)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        async with self.router.probing():
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})


def _forwarded_name(method: str, path: str) -> str | None:
    """The endpoint's name if its requests are forwarded."""
    if method == "POST":
        return FORWARDED[path].name if path in FORWARDED else None
    return OF_A_USER.get(method) if path.startswith(USERS) and path != USERS else None


def _forwarded_handlers() -> dict[str, Handler]:
    """Handlers for the forwarded paths, so that Starlette answers a wrong method with 405.

    Requests with the right method never come here.
    """

    async def refuse(_message: object, _context: RequestContext) -> None:
        raise HttpProblem(404, "not_found", "Not Found")

    names = [endpoint.name for endpoint in FORWARDED.values()]
    return dict.fromkeys((*names, *OF_A_USER.values()), refuse)


def build_router(router: Router, keys: Keys, limits: Limits) -> Gate:
    """Build the ASGI app of a router, ready for uvicorn."""
    return Gate(RouterApp(router, limits), keys, limits)
