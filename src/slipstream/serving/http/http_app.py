"""What the apps of instance and router share: sizes, deadlines, metrics, refusals as JSON.

Touch this when every endpoint of both changes; one endpoint is in endpoints.py, who may call is
decided in gate.py.
"""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.convertors import Convertor, register_url_convertor
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from slipstream.errors import SlipstreamError
from slipstream.history.history_store import AppendError, HistoryStoreError
from slipstream.serving.http import messages
from slipstream.serving.http.docs_page import PAGE_POLICY, docs_page
from slipstream.serving.http.endpoints import (
    DEADLINE_HEADER,
    ENDPOINTS,
    HTML,
    Endpoint,
    Role,
    no_body,
    openapi,
)
from slipstream.serving.http.gone_client import GONE_STATUS, ClientGoneError, GoneClient
from slipstream.serving.http.limits import Limits
from slipstream.serving.http.observed_request import (
    HIT_HEADER,
    ID_HEADER,
    REASON_HEADER,
    TIMING_HEADER,
    ObservedRequest,
    observer,
)
from slipstream.serving.http.request_metrics import RequestMetrics as RequestMetrics
from slipstream.serving.instance.request_stages import recorded_stages
from slipstream.serving.logs import Occasionally
from slipstream.serving.request_errors import BadRequest, DeadlineError, OverloadError
from slipstream.serving.tenants import inner_user

log = logging.getLogger("slipstream.serving")
_store_lines = Occasionally(5.0)  # of the log, while a store is away
JSON = "application/json"
MEDIA = {  # of answers that are no JSON
    str: "text/plain; version=0.0.4; charset=utf-8",
    HTML: "text/html; charset=utf-8",
}
_encode = msgspec.json.Encoder().encode
_DEADLINE = DEADLINE_HEADER.encode()
CALLER = "slipstream.caller"  # of an ASGI scope: a `Caller`


@dataclass(frozen=True)
class Caller:
    """Who sent a request: its slot in the rates, its own rate, its tenant."""

    slot: int | str
    rate: float | None
    tenant: str | None


NOBODY = Caller("", None, None)


class HttpProblem(Exception):
    """A refusal with its HTTP status; it is sent as a `Problem`."""

    def __init__(
        self, status: int, code: str, detail: str, retry_after: float | None = None
    ) -> None:
        super().__init__(detail)
        self.status, self.code, self.detail, self.retry_after = status, code, detail, retry_after


def problem_of(error: Exception, detailed: bool = False) -> HttpProblem:
    """Return the refusal for an exception; an unexpected one is logged, and not shown.

    A fault of the server's own files is shown in detail to operators only.
    """
    match error:
        case HttpProblem():
            return error
        case msgspec.DecodeError() | UnicodeDecodeError() | BadRequest():
            return HttpProblem(400, "bad_request", str(error))
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
        case ClientGoneError():
            return HttpProblem(GONE_STATUS, "client_gone", "the client has gone")
        case HistoryStoreError():
            held = _store_lines.passes()
            if held is not None:
                log.error("the history store failed: %s", error, extra={
                    "fields": {"held_back": held} if held else {}
                })  # fmt: skip
            return HttpProblem(
                503,
                "store_unavailable",
                "the history store does not answer; try again soon, or send the history with the "
                "request",
                retry_after=1.0,
            )
        case SlipstreamError():  # it may name files and hosts, which are not the caller's business
            log.error("a request failed: %s", error)
            hidden = "the model cannot answer this request; see the server's log"
            return HttpProblem(503, "unavailable", str(error) if detailed else hidden)
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
    for key, value in headers:
        if key == name:
            return value
    return None


async def read_body(scope: Scope, receive: Receive, limits: Limits) -> bytes:
    """Read the whole body, within the limits of size and time."""
    announced = header(scope, b"content-length")
    try:
        async with asyncio.timeout(limits.body_seconds):
            if announced is not None and int(announced) > limits.max_body_bytes:
                await _discard(receive, limits)
                raise _too_large(limits)
            return await _receive_all(receive, limits)
    except TimeoutError as error:
        raise HttpProblem(408, "timeout", "the body did not arrive in time") from error


async def _receive_all(receive: Receive, limits: Limits) -> bytes:
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        _refuse_disconnect(message)
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        more = message.get("more_body", False)
        if size > limits.max_body_bytes:
            if more:
                await _discard(receive, limits)
            raise _too_large(limits)
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def _discard(receive: Receive, limits: Limits) -> None:
    """Read on in a body that is too large: a client that is still sending would miss the answer."""
    discarded, more = 0, True
    while more and discarded < 8 * limits.max_body_bytes:
        message = await receive()
        discarded += len(message.get("body", b""))
        more = message.get("more_body", False)


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


@dataclass(frozen=True)
class RequestContext:
    """What a handler gets with the message: deadline, path and query parameters, tenant.

    What it puts into `headers` is sent with its answer.
    """

    deadline: float
    path: Mapping[str, str]
    query: Mapping[str, str]
    headers: dict[str, str] = field(default_factory=dict)
    tenant: str | None = None


Handler = Callable[[Any, RequestContext], Awaitable[Any]]


def build(
    role: Role,
    handlers: Mapping[str, Handler],
    limits: Limits,
    metrics: RequestMetrics,
    table: Sequence[Endpoint] = ENDPOINTS,
) -> ASGIApp:
    """Build the app of a role: every endpoint of the table; Starlette refuses other paths."""
    described = openapi(role, table)
    document, page = json.dumps(described).encode(), docs_page(described)

    async def show_document(_message: None, _context: RequestContext) -> bytes:
        return document

    async def show_page(_message: None, context: RequestContext) -> bytes:
        context.headers["content-security-policy"] = PAGE_POLICY
        return page

    async def show_metrics(_message: None, _context: RequestContext) -> bytes:
        return metrics.text()

    all_handlers: dict[str, Handler] = {
        **handlers,
        "openapi": show_document,
        "docs": show_page,
        "metrics": show_metrics,
    }
    routes = [
        Route(
            endpoint.path.replace("}", ":anything}"),
            _Endpoint(endpoint, all_handlers[endpoint.name], limits, metrics),
            methods=[endpoint.method],
        )
        for endpoint in table
        if role in endpoint.roles
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _plain_refusal})
    app.router.redirect_slashes = False
    return _Endpoints(routes, app)


def _plain_refusal(_request: Request, error: Exception) -> Response:
    """Return 404 and 405 of the routing itself as JSON."""
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "refused")
    problem = HttpProblem(error.status_code, code, error.detail)
    return Response(
        problem_body(problem),
        error.status_code,
        headers=dict(error.headers or {}),
        media_type=JSON,
    )


def _read_query(endpoint: Endpoint, scope: Scope) -> Mapping[str, str]:
    """Return the query parameters; a misspelt one such as `limt=5` is refused but by open paths."""
    if not scope["query_string"]:
        return {}
    query = QueryParams(scope["query_string"])
    unknown = [name for name in query if name not in endpoint.query]
    if unknown and not endpoint.open:
        known = ", ".join(endpoint.query) or "none"
        raise HttpProblem(
            400,
            "bad_request",
            f"unknown query parameter '{unknown[0][:40]}'; {endpoint.path} takes: {known}",
        )
    return query


class _Endpoint:
    """One endpoint as an ASGI app: decode, call the handler in time, encode, count."""

    def __init__(
        self, endpoint: Endpoint, handler: Handler, limits: Limits, metrics: RequestMetrics
    ) -> None:
        self._endpoint, self._handler, self._limits = endpoint, handler, limits
        self._metrics = metrics
        asked = endpoint.request
        self._decode = msgspec.json.Decoder(asked).decode if asked is not None else None
        self._media = MEDIA.get(endpoint.answer, JSON).encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint, started, status = self._endpoint, time.monotonic(), self._endpoint.status
        observed = observer().begin(scope, endpoint.name)
        headers: dict[str, str] = {}
        try:
            content = await self._answer(scope, receive, started, headers, observed)
        except Exception as error:
            problem = problem_of(error, detailed=endpoint.needs == "admin")
            status, content = problem.status, problem_body(problem)
            headers[REASON_HEADER] = problem.code
            if problem.retry_after is not None:
                headers["retry-after"] = str(max(1, round(problem.retry_after)))
            if endpoint.open:
                content = _encode(messages.HealthAnswer(problem.detail))
        observed.hit, observed.reason = headers.get(HIT_HEADER, ""), headers.get(REASON_HEADER, "")
        seconds = time.monotonic() - started
        self._metrics.count(endpoint.name, status, seconds, observed.hit, observed.reason)
        if not endpoint.open:  # probes are no requests
            observer().end(observed, endpoint.name, status, seconds)
        headers[ID_HEADER] = observed.request_id
        if observed.stages:
            headers[TIMING_HEADER] = observed.stages
        sent = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        media = self._media if status == endpoint.status else JSON.encode()
        await send_answer(send, status, [*sent, (b"content-type", media)], content)

    async def _answer(
        self,
        scope: Scope,
        receive: Receive,
        started: float,
        headers: dict[str, str],
        observed: ObservedRequest,
    ) -> bytes:
        """Return what the handler answers; it adds to `headers`."""
        endpoint, limits = self._endpoint, self._limits
        deadline = (
            read_deadline(scope, limits, started)
            if endpoint.timed
            else started + limits.max_deadline_ms / 1000
        )
        query = _read_query(endpoint, scope)
        body = await read_body(scope, receive, limits)
        if self._decode is not None and not body:
            raise BadRequest(no_body(endpoint))
        message: Any = self._decode(body) if self._decode is not None else None
        tenant = scope.get(CALLER, NOBODY).tenant
        path = dict(scope.get("path_params", {}))
        if hasattr(message, "user"):
            message.user = inner_user(tenant, message.user)
        if "user" in path:
            path["user"] = inner_user(tenant, path["user"])
        end = deadline - started + asyncio.get_running_loop().time()
        context = RequestContext(deadline, path, query, headers, tenant)
        with recorded_stages() as stages:
            try:
                async with GoneClient(receive), asyncio.timeout_at(end):
                    answer = await self._handler(message, context)
            finally:
                observed.note_stages(stages.found)
        return answer if isinstance(answer, bytes) else _encode(answer)


class _Endpoints:
    """The endpoints of a role. One whose path has no parameter is called without a routing."""

    def __init__(self, routes: Sequence[Route], role_app: ASGIApp) -> None:
        self._routed = role_app
        self._direct: dict[tuple[str, str], ASGIApp] = {
            (method, route.path): route.app
            for route in routes
            for method in route.methods or ()
            if not route.param_convertors
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._direct.get((scope["method"], scope["path"]), self._routed)
        await app(scope, receive, send)


class _AnyText(Convertor[str]):
    """A path parameter of any text, slashes and line breaks included."""

    regex = "(?s:.+)"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("anything", _AnyText())
