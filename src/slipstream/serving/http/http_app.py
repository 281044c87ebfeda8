"""What the apps of instance and router share: API keys, rates, sizes, deadlines, refusals as JSON.

Touch this when every endpoint of both changes; one endpoint is in endpoints.py.
"""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import prometheus_client as prometheus
from prometheus_client.core import GaugeMetricFamily
from starlette.applications import Starlette
from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from slipstream.errors import SlipstreamError
from slipstream.history.history_store import AppendError, HistoryStoreError
from slipstream.serving.http import messages
from slipstream.serving.http.endpoints import (
    DEADLINE_HEADER,
    ENDPOINTS,
    KEY_HEADER,
    Endpoint,
    Role,
    no_body,
    openapi,
)
from slipstream.serving.http.limits import Keys, Limits, RateLimit
from slipstream.serving.request_errors import BadRequest, DeadlineError, OverloadError
from slipstream.serving.router.ticket import TicketError

log = logging.getLogger("slipstream.serving")
_encode = msgspec.json.Encoder().encode
_OPEN_PATHS = frozenset(endpoint.path for endpoint in ENDPOINTS if endpoint.open)
_KEY, _DEADLINE = KEY_HEADER.encode(), DEADLINE_HEADER.encode()


class HttpProblem(Exception):
    """A refusal with its HTTP status; it is sent as a `Problem`."""

    def __init__(
        self, status: int, code: str, detail: str, retry_after: float | None = None
    ) -> None:
        super().__init__(detail)
        self.status, self.code, self.detail, self.retry_after = status, code, detail, retry_after


def problem_of(error: Exception) -> HttpProblem:
    """Return the refusal for an exception; an unexpected one is logged, and not shown."""
    match error:
        case HttpProblem():
            return error
        case msgspec.DecodeError() | UnicodeDecodeError() | BadRequest():
            return HttpProblem(400, "bad_request", str(error))
        case TicketError():
            return HttpProblem(
                410 if error.code == "ticket_expired" else 403, error.code, error.detail
            )
        case AppendError():
            return HttpProblem(409, "conflict", str(error))
        case OverloadError():
            draining = error.reason == "draining"
            return HttpProblem(
                503 if draining else 429,
                "draining" if draining else "overloaded",
                str(error),
                retry_after=1.0,
            )
        case DeadlineError() | TimeoutError():
            return HttpProblem(
                504,
                "deadline_passed",
                str(error) or "the deadline passed before the answer was ready",
            )
        case HistoryStoreError():
            log.error("the history store failed: %s", error)
            return HttpProblem(
                503,
                "store_unavailable",
                "the history store does not answer; try again soon, or send the history with the "
                "request",
                retry_after=1.0,
            )
        case SlipstreamError():
            return HttpProblem(503, "unavailable", str(error))
    log.exception("a request failed unexpectedly", exc_info=error)
    return HttpProblem(500, "internal", "the server failed on this request; see its log")


def problem_headers(problem: HttpProblem) -> list[tuple[bytes, bytes]]:
    """Return the headers of a refusal."""
    headers = [(b"content-type", b"application/json")]
    if problem.retry_after is not None:
        headers.append((b"retry-after", str(max(1, round(problem.retry_after))).encode()))
    return headers


def problem_body(problem: HttpProblem) -> bytes:
    """Return a refusal as JSON."""
    return _encode(messages.Problem(problem.code, problem.detail))


async def send_answer(
    send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes
) -> None:
    """Send a whole answer over ASGI."""
    headers = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def header(scope: Scope, name: bytes) -> bytes | None:
    """Return the first value of a header (names are lower case in ASGI)."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    return next((value for key, value in headers if key == name), None)


async def read_body(scope: Scope, receive: Receive, limits: Limits) -> bytes:
    """Read the whole body, within the limits of size and time."""
    announced = header(scope, b"content-length")
    if announced is not None and int(announced) > limits.max_body_bytes:
        await _discard(receive, limits)
        raise _too_large(limits)
    message = await receive() if announced == b"0" else await _receive(receive, limits)
    body: bytes = message.get("body", b"")
    if not message.get("more_body", False):
        _refuse_disconnect(message)
        if len(body) > limits.max_body_bytes:
            raise _too_large(limits)
        return body
    parts, size = [body], len(body)
    while message.get("more_body", False):
        message = await _receive(receive, limits)
        _refuse_disconnect(message)
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limits.max_body_bytes:
            await _discard(receive, limits)
            raise _too_large(limits)
    return b"".join(parts)


async def _discard(receive: Receive, limits: Limits) -> None:
    """Read on in a body that is too large: a client that is still sending would miss the answer."""
    discarded, more = 0, True
    while more and discarded < 8 * limits.max_body_bytes:
        message = await _receive(receive, limits)
        discarded += len(message.get("body", b""))
        more = message.get("more_body", False)


async def _receive(receive: Receive, limits: Limits) -> Any:
    """Receive one ASGI message within the time limit."""
    try:
        async with asyncio.timeout(limits.body_seconds):
            return await receive()
    except TimeoutError as error:
        raise HttpProblem(400, "bad_request", "the body did not arrive in time") from error


def _refuse_disconnect(message: Any) -> None:
    if message["type"] == "http.disconnect":
        raise HttpProblem(400, "bad_request", "the client went away before its body was complete")


def _too_large(limits: Limits) -> HttpProblem:
    return HttpProblem(
        413,
        "too_large",
        f"the body is above the limit of {limits.max_body_bytes:,} bytes; send less at once",
    )


def read_deadline(scope: Scope, limits: Limits, now: float) -> float:
    """Return when the answer is due (monotonic time): from the header, or the default."""
    given = header(scope, _DEADLINE)
    if given is None:
        return now + limits.deadline_ms / 1000
    try:
        milliseconds = float(given)
    except ValueError:
        milliseconds = -1.0
    if not 0 < milliseconds <= limits.max_deadline_ms:
        raise HttpProblem(
            400,
            "bad_request",
            f"{DEADLINE_HEADER} is a number of milliseconds above 0, at most "
            f"{limits.max_deadline_ms:g}",
        )
    return now + milliseconds / 1000


class RequestMetrics:
    """Counts and times requests by endpoint, and shows a server's own numbers, for Prometheus."""

    def __init__(
        self,
        read_stats: Callable[[], Mapping[tuple[str, ...], float]],
        labels: tuple[str, ...] = (),
    ) -> None:
        """`read_stats` returns (name, *label values) → number at every scrape."""
        self._registry = prometheus.CollectorRegistry()
        buckets = (0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56)
        self._seconds = prometheus.Histogram(
            "slipstream_request_seconds",
            "Time to answer",
            ("endpoint",),
            registry=self._registry,
            buckets=buckets,
        )
        self._answers = prometheus.Counter(
            "slipstream_answers",
            "Answers by status",
            ("endpoint", "status"),
            registry=self._registry,
        )
        self._read_stats, self._labels = read_stats, labels
        self._known: dict[tuple[str, int], tuple[Any, Any]] = {}
        self._registry.register(self)

    def count(self, endpoint: str, status: int, seconds: float) -> None:
        """Note one answer."""
        found = self._known.get((endpoint, status))
        if found is None:
            found = self._known[endpoint, status] = (
                self._seconds.labels(endpoint),
                self._answers.labels(endpoint, str(status)),
            )
        found[0].observe(seconds)
        found[1].inc()

    def collect(self) -> list[GaugeMetricFamily]:
        """Return the server's own numbers; the registry calls this at every scrape."""
        families: dict[str, GaugeMetricFamily] = {}
        for (name, *values), number in self._read_stats().items():
            metric = "slipstream_" + "".join(c if c.isalnum() else "_" for c in name)
            family = families.setdefault(
                metric, GaugeMetricFamily(metric, name, labels=self._labels[: len(values)])
            )
            family.add_metric(values, number)
        return list(families.values())

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return prometheus.generate_latest(self._registry)


class Gate:
    """The outermost layer: refuses requests without a key, and callers above their rate.

    Lifespan messages and open paths pass.
    """

    def __init__(self, app: ASGIApp, keys: Keys, limits: Limits) -> None:
        self._app, self._keys, self._rate = app, keys, RateLimit(limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        problem = self._refusal(scope)
        if problem is None:
            await self._app(scope, receive, send)
        else:
            await send_answer(send, problem.status, problem_headers(problem), problem_body(problem))

    def _refusal(self, scope: Scope) -> HttpProblem | None:
        """Return why this request is refused, None if it may pass."""
        caller: object = (scope.get("client") or ("",))[0]
        if self._keys:
            caller = self._keys.accept(header(scope, _KEY))
            if caller is None:
                return HttpProblem(
                    401, "unauthorized", f"send your API key in the header {KEY_HEADER}"
                )
        wait = self._rate.take(caller)
        if wait:
            return HttpProblem(
                429, "rate_limited", f"too many requests; wait {wait:.1f} s", retry_after=wait
            )
        return None


@dataclass(frozen=True)
class RequestContext:
    """What a handler gets with the message: deadline, path and query parameters."""

    deadline: float
    path: Mapping[str, str]
    query: Mapping[str, str]


Handler = Callable[[Any, RequestContext], Awaitable[Any]]


def build(
    role: Role, handlers: Mapping[str, Handler], limits: Limits, metrics: RequestMetrics
) -> Starlette:
    """Build the Starlette app of a role: one route per endpoint of the table."""
    document = json.dumps(openapi(role)).encode()

    async def show_document(_message: None, _context: RequestContext) -> bytes:
        return document

    async def show_metrics(_message: None, _context: RequestContext) -> bytes:
        return metrics.text()

    all_handlers: dict[str, Handler] = {
        **handlers,
        "openapi": show_document,
        "metrics": show_metrics,
    }
    routes = [
        _route(endpoint, all_handlers[endpoint.name], limits, metrics)
        for endpoint in ENDPOINTS
        if role in endpoint.roles
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _plain_refusal})


def _plain_refusal(_request: Request, error: Exception) -> Response:
    """Return 404 and 405 of the routing itself as JSON."""
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "refused")
    problem = HttpProblem(error.status_code, code, error.detail)
    return Response(
        problem_body(problem),
        error.status_code,
        headers=dict(error.headers or {}),
        media_type="application/json",
    )


def _refuse_unknown_query(endpoint: Endpoint, request: Request) -> None:
    """Refuse a misspelt query parameter such as `limt=5`, except on open paths (probes)."""
    unknown = [name for name in request.query_params if name not in endpoint.query]
    if unknown and not endpoint.open:
        known = ", ".join(endpoint.query) or "none"
        raise HttpProblem(
            400,
            "bad_request",
            f"unknown query parameter '{unknown[0][:40]}'; {endpoint.path} takes: {known}",
        )


def _route(endpoint: Endpoint, handler: Handler, limits: Limits, metrics: RequestMetrics) -> Route:
    """Return the route of an endpoint: decode, call the handler in time, encode, count."""
    decode = msgspec.json.Decoder(endpoint.request).decode if endpoint.request is not None else None
    media = "text/plain; version=0.0.4" if endpoint.answer is str else "application/json"

    async def serve(request: Request) -> Response:
        started, status = time.monotonic(), endpoint.status
        headers: dict[str, str] | None = None
        try:
            deadline = (
                read_deadline(request.scope, limits, started)
                if endpoint.timed
                else started + limits.max_deadline_ms / 1000
            )
            _refuse_unknown_query(endpoint, request)
            body = await read_body(request.scope, request.receive, limits)
            if decode is not None and not body:
                raise BadRequest(no_body(endpoint))
            message = decode(body) if decode is not None else None
            async with asyncio.timeout_at(deadline - started + asyncio.get_running_loop().time()):
                answer = await handler(
                    message, RequestContext(deadline, request.path_params, request.query_params)
                )
            content = answer if isinstance(answer, bytes) else _encode(answer)
        except Exception as error:
            problem = problem_of(error)
            status, content = problem.status, problem_body(problem)
            headers = (
                {"retry-after": str(max(1, round(problem.retry_after)))}
                if problem.retry_after is not None
                else None
            )
            if endpoint.open:
                content = _encode(messages.HealthAnswer(problem.detail))
        metrics.count(endpoint.name, status, time.monotonic() - started)
        return Response(
            content,
            status,
            headers=headers,
            media_type=media if status == endpoint.status else "application/json",
        )

    return Route(endpoint.path.replace("}", ":anything}"), serve, methods=[endpoint.method])


class _AnyText(Convertor[str]):
    """A path parameter of any text, slashes and line breaks included."""

    regex = "(?s:.+)"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("anything", _AnyText())
