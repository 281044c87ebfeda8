"""The outermost layer of an app: who may call what, how often, and from which page.

Touch this when every request is accepted or refused in another way; keys are in api_keys.py, rates
in limits.py.
"""

from starlette.types import ASGIApp, Receive, Scope, Send

from slipstream.errors import SlipstreamError
from slipstream.serving.http.api_keys import ApiKey, KeyRole, Keys
from slipstream.serving.http.endpoints import KEY_HEADER, TENANT_HEADER, endpoint_at
from slipstream.serving.http.http_app import (
    CALLER,
    Caller,
    HttpProblem,
    RequestMetrics,
    header,
    problem_body,
    problem_headers,
    send_answer,
)
from slipstream.serving.http.limits import BodyBudget, Limits, RateLimit
from slipstream.serving.tenants import check_tenant

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_KEY, _TENANT = KEY_HEADER.encode(), TENANT_HEADER.encode()
_ANYBODY = ApiKey("", "admin")  # where no keys are set


class Gate:
    """Refuses requests without a key, beyond their role or rate, or from a foreign web page.

    Lifespan messages and open paths pass.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        limits: Limits,
        metrics: RequestMetrics,
        *,
        rates: RateLimit | None = None,
        hosts: frozenset[str] = LOOPBACK_NAMES,
        public: bool = True,
    ) -> None:
        """`hosts` are the names that a server without keys may be called by.

        An app that is not `public` stands behind a router, which checks what browsers send.
        """
        self._app, self._keys, self._metrics = app, keys, metrics
        self._rates = rates or RateLimit(limits)
        self._bodies = BodyBudget(limits)
        self._hosts, self._public = hosts, public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        endpoint = endpoint_at(scope["method"], scope["path"])
        if endpoint is not None and endpoint.open:
            await self._app(scope, receive, send)
            return
        problem = self._refusal(scope, "client" if endpoint is None else endpoint.needs)
        size: int | None = None
        if problem is None:
            chunked = header(scope, b"transfer-encoding") is not None
            size = self._bodies.reserve(header(scope, b"content-length"), chunked)
        if size is None:
            problem = problem or HttpProblem(
                503, "overloaded", "too many large requests are under way", retry_after=1.0
            )
            name = "other" if endpoint is None else endpoint.name
            self._metrics.count(name, problem.status, 0.0)
            await send_answer(send, problem.status, problem_headers(problem), problem_body(problem))
            return
        try:
            await self._app(scope, receive, send)
        finally:
            self._bodies.release(size)

    def _refusal(self, scope: Scope, needed: KeyRole) -> HttpProblem | None:
        """Return why this request is refused, None if it may pass."""
        slot: int | str = (scope.get("client") or ("",))[0]
        key = _ANYBODY
        if self._keys:
            found = self._keys.accept(header(scope, _KEY))
            if found is None:
                return HttpProblem(
                    401, "unauthorized", f"send your API key in the header {KEY_HEADER}"
                )
            slot, key = found
        elif self._public:
            foreign = self._foreign(scope)
            if foreign is not None:
                return foreign
        if not key.may(needed):
            return HttpProblem(
                403, "forbidden", f"this endpoint needs a key of role {needed}; yours is a "
                f"{key.role}'s" + (" of a tenant" if key.tenant else "")
            )  # fmt: skip
        if scope["method"] == "POST" and not _is_json(header(scope, b"content-type")):
            return HttpProblem(
                415, "unsupported_media_type", "send JSON, with content-type: application/json"
            )
        wait = self._rates.take(slot, rate=key.rate)
        if wait:
            return rate_problem(wait)
        try:
            scope[CALLER] = Caller(slot, key.rate, _tenant(scope, key))
        except SlipstreamError as error:
            return HttpProblem(400, "bad_request", str(error))
        return None

    def _foreign(self, scope: Scope) -> HttpProblem | None:
        """Refuse what a web page of another site makes a browser send; a key would stop it, too."""
        host = (header(scope, b"host") or b"").decode("latin-1").lower()
        name = host.rpartition("]")[0].lstrip("[") if "]" in host else host.partition(":")[0]
        if name not in self._hosts:
            return HttpProblem(
                403,
                "forbidden",
                "a server without API keys answers to localhost only; call it by that name, or "
                "set a key",
            )
        origin = header(scope, b"origin")
        if origin is not None and origin.decode("latin-1") != f"{scope['scheme']}://{host}":
            return HttpProblem(
                403,
                "forbidden",
                "a server without API keys answers its own pages only; set a key",
            )
        return None


def _is_json(content_type: bytes | None) -> bool:
    return (content_type or b"").partition(b";")[0].strip().lower() == b"application/json"


def _tenant(scope: Scope, key: ApiKey) -> str | None:
    """Return whose users a request is about; an admin may name a tenant in a header."""
    named = header(scope, _TENANT) if key.role == "admin" else None
    if not named:
        return key.tenant
    tenant = named.decode("latin-1")
    check_tenant(tenant)
    return tenant


def rate_problem(wait: float) -> HttpProblem:
    """Return the refusal of a caller above its rate."""
    return HttpProblem(
        429, "rate_limited", f"too many requests; wait {wait:.1f} s", retry_after=wait
    )
