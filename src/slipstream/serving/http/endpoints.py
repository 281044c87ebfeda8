"""The HTTP interface as a table: every endpoint once.

The routes and the OpenAPI document are made from it. Touch this when an endpoint is added or
changes its path, message or status; the messages are in messages.py.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

import slipstream
from slipstream.serving.http import explore_messages as em
from slipstream.serving.http import messages as m
from slipstream.serving.http import version_messages as vm
from slipstream.serving.http.api_keys import KeyRole
from slipstream.serving.versions import VersionRecord

Role = Literal["instance", "router", "page"]
KEY_HEADER, DEADLINE_HEADER, BACKLOG_HEADER, BEHAVIOURS_HEADER, TENANT_HEADER = (
    "x-api-key",
    "x-slipstream-deadline-ms",
    "x-slipstream-backlog",
    "x-slipstream-behaviours",
    "x-slipstream-tenant",
)
UNKEPT_HEADER = "x-slipstream-unkept"  # of an answer that leaves no prefix of the user

MEANING = {
    400: "The message is malformed, or asks for something this model does not know.",
    401: "The API key is missing or wrong.",
    403: "The key may not do this, the server does not, or a foreign web page asks it to.",
    404: "Nothing is stored under this name.",
    408: "The body did not arrive in time.",
    409: "What is stored already does not let this follow.",
    413: "The body is too large.",
    415: "The content type is not application/json.",
    429: "Too many requests, or refused to keep the promise to others; see Retry-After.",
    502: "The instance failed while it worked on this request.",
    503: "Not ready, draining, no instance is left, or the history store does not answer.",
    504: "The deadline passed.",
}


HTML = "html"  # the answer of an endpoint that is a page


@dataclass(frozen=True)
class Endpoint:
    """One method of one path. `problems` are its own error statuses, besides those of all."""

    name: str
    method: Literal["GET", "POST", "DELETE"]
    path: str
    summary: str
    answer: Any
    request: Any = None
    status: int = 200
    problems: tuple[int, ...] = ()
    roles: tuple[Role, ...] = ("instance", "router")
    open: bool = False  # needs no API key
    needs: KeyRole = "client"  # the role a key must have
    timed: bool = False  # accepts the deadline header
    query: dict[str, dict[str, Any]] = field(default_factory=dict)
    example: dict[str, Any] | None = None  # a request, for the document and for who sent none


def no_body(endpoint: Endpoint) -> str:
    """Return the sentence that refuses an empty body."""
    return f"the request has no body; send JSON like {json.dumps(endpoint.example)}"


_CHANGE = (409, 502, 503, 504)  # of every change of versions
_FORWARDED = (429, 502, 503, 504)  # of every endpoint that a router forwards to an instance
ENDPOINTS = (
    Endpoint(
        "preinfer", "POST", "/v1/preinfer", "Compute a user's history before it is needed; "
        "returns a ticket for /v1/rank.",
        m.PreinferAnswer, m.PreinferRequest,
        status=202, problems=(404, *_FORWARDED), timed=True,
        example={"user": "ann", "rank_in_ms": 120},
    ),
    Endpoint(
        "rank", "POST", "/v1/rank", "Score candidates for a user.",
        m.RankAnswer, m.RankRequest, problems=(404, *_FORWARDED), timed=True,
        example={"user": "ann", "candidates": [260, 1210, 480], "titles": True},
    ),
    Endpoint(
        "recommend", "POST", "/v1/recommend", "Retrieve items, drop those seen or excluded, "
        "rank the rest and return the best.",
        m.RecommendAnswer, m.RecommendRequest, problems=(404, *_FORWARDED), timed=True,
        example={"user": "ann", "count": 10, "titles": True},
    ),
    Endpoint(
        "events", "POST", "/v1/events", "Append behaviours to a user's stored history; with "
        "`preinfer`, announce the ranking that follows.",
        m.EventsAnswer, m.EventsRequest, problems=(409, *_FORWARDED), timed=True,
        example={"user": "ann", "items": [2858, 1196], "timestamps": [978300000, 978300100]},
    ),
    Endpoint(
        "user", "GET", "/v1/users/{user}", "What is stored of a user.",
        m.UserAnswer, problems=(404, *_FORWARDED), timed=True,
        query={"limit": {"type": "integer", "minimum": 0, "maximum": 1000, "default": 20}},
    ),
    Endpoint(
        "delete", "DELETE", "/v1/users/{user}", "Delete a user's stored history and cached "
        "prefixes.",
        m.DeleteAnswer, problems=_FORWARDED, timed=True,
    ),
    Endpoint(
        "export", "GET", "/v1/export/{user}", "Everything that is stored of a user.",
        m.UserAnswer, problems=(404, *_FORWARDED), timed=True,
    ),
    Endpoint(
        "users", "GET", "/v1/users", "List users of the history store, in the order of their ids.",
        em.UsersAnswer, problems=_FORWARDED, timed=True,
        query={
            "limit": {"type": "integer", "minimum": 1, "maximum": 1000, "default": 20},
            "after": {"type": "string", "maxLength": 256},
        },
    ),
    Endpoint(
        "model", "GET", "/v1/model", "What is served: the model's tasks, sizes and names.",
        em.ModelAnswer, problems=_FORWARDED, timed=True,
    ),
    Endpoint(
        "items", "POST", "/v1/items", "Look items up by id: titles and features.",
        em.ItemsAnswer, em.ItemsRequest, problems=_FORWARDED, timed=True,
        example={"items": [260, 1210]},
    ),
    Endpoint(
        "search", "POST", "/v1/search", "Find items by title or id.",
        em.ItemsAnswer, em.SearchRequest, problems=_FORWARDED, timed=True,
        example={"query": "star wars", "count": 5},
    ),
    Endpoint(
        "neighbours", "POST", "/v1/neighbours", "Find the items whose vectors are nearest.",
        em.ItemsAnswer, em.NeighboursRequest, problems=_FORWARDED, timed=True,
        example={"item": 260, "count": 5},
    ),
    Endpoint(
        "explain", "POST", "/v1/explain", "Measure what each behaviour adds to the score of an "
        "item: exact scores with the behaviour left out.",
        em.ExplainAnswer, em.ExplainRequest, problems=(404, *_FORWARDED), timed=True,
        example={"user": "ann", "item": 260},
    ),
    Endpoint(
        "status", "GET", "/v1/status", "The instance about itself.",
        m.StatusAnswer, roles=("instance",),
    ),
    Endpoint("healthz", "GET", "/healthz", "Is the process alive?", m.HealthAnswer, open=True),
    Endpoint(
        "readyz", "GET", "/readyz", "May it be sent requests?",
        m.HealthAnswer, open=True, problems=(503,),
    ),
    Endpoint(
        "metrics", "GET", "/metrics", "Counters and gauges for Prometheus.", str, needs="metrics"
    ),
    Endpoint(
        "drain", "POST", "/admin/drain", "Finish what is here and take nothing new.",
        m.DrainAnswer, m.DrainRequest, problems=(404, 502, 503, 504),
        example={"instance": "i-0"}, needs="admin",
    ),
    Endpoint(
        "undrain", "POST", "/admin/undrain", "Take requests again after a drain.",
        m.UndrainAnswer, m.DrainRequest, problems=(404, 409, 502, 503, 504),
        example={"instance": "i-0"}, needs="admin",
    ),
    Endpoint(
        "reload", "POST", "/admin/reload", "Open what the bundle's directory holds now, and serve "
        "it to all users or to a share of them.",
        m.ReloadAnswer, m.ReloadRequest, problems=_CHANGE, roles=("router",), example={},
        needs="admin",
    ),
    Endpoint(
        "traffic", "POST", "/admin/traffic", "Change the candidate's share of the users; at 1 it "
        "becomes the stable version.",
        m.ReloadAnswer, vm.TrafficRequest, problems=_CHANGE, roles=("router",),
        example={"share": 0.2}, needs="admin",
    ),
    Endpoint(
        "rollback", "POST", "/admin/rollback", "Drop the candidate; without one, serve the version "
        "before.",
        m.ReloadAnswer, vm.RollbackRequest, problems=_CHANGE, roles=("router",), example={},
        needs="admin",
    ),
    Endpoint(
        "versions", "GET", "/admin/versions", "The versions that are served, and their shares.",
        vm.VersionsAnswer, problems=(502, 503, 504), needs="admin",
    ),
    Endpoint(
        "prepare", "POST", "/admin/prepare", "Open and warm what the bundle's directory holds now.",
        vm.PrepareAnswer, vm.PrepareRequest, problems=(409, 503), roles=("instance",), example={},
        needs="admin",
    ),
    Endpoint(
        "switch", "POST", "/admin/switch", "Serve by a record of versions.",
        m.ReloadAnswer, VersionRecord, problems=(409, 503), roles=("instance",),
        example={"stable": "0123abcd"}, needs="admin",
    ),
    Endpoint(
        "fleet", "GET", "/v1/fleet", "The instances: state, caches, hits, times, refusals.",
        em.FleetAnswer, roles=("router",), needs="metrics",
    ),
    Endpoint(
        "page", "GET", "/v1/page", "What the web page at / can show here.",
        em.PageAnswer, roles=("router",),
    ),
    Endpoint(
        "kill", "POST", "/admin/kill", "Kill an instance as a crash would, where `--allow-kill` "
        "permits it.",
        em.KillAnswer, em.KillRequest, problems=(404, 502, 503, 504),
        example={"instance": "i-0"}, needs="admin",
    ),
    Endpoint("openapi", "GET", "/openapi.json", "This document.", dict),
    Endpoint(
        "docs", "GET", "/docs", "This document as a page to read, with a command for every "
        "endpoint.",
        HTML,
    ),
)  # fmt: skip


_AT: dict[tuple[str, str], Endpoint] = {(e.method, e.path): e for e in ENDPOINTS}
_OF_PATH = {endpoint.path: endpoint for endpoint in ENDPOINTS}
_BEFORE_USER = [
    (endpoint.path.removesuffix("{user}"), endpoint)
    for endpoint in ENDPOINTS
    if endpoint.path.endswith("{user}")
]


def endpoint_at(method: str, path: str) -> Endpoint | None:
    """Return the endpoint of a request, or one of the same path; None for an unknown path."""
    found = _AT.get((method, path)) or _OF_PATH.get(path)
    if found is None:
        of_path = [each for start, each in _BEFORE_USER if path.startswith(start)]
        found = next((each for each in of_path if each.method == method), None)
        found = found or next(iter(of_path), None)
    return found


def openapi(role: Role, table: Sequence[Endpoint] = ENDPOINTS) -> dict[str, Any]:
    """Make the OpenAPI 3.1 document of a role's endpoints."""
    endpoints = [endpoint for endpoint in table if role in endpoint.roles]
    structs = {
        part
        for e in endpoints
        for part in (e.request, e.answer)
        if isinstance(part, type) and issubclass(part, msgspec.Struct)
    }
    ordered = sorted(structs | {m.Problem}, key=lambda struct: struct.__name__)
    _, components = msgspec.json.schema_components(
        ordered, ref_template="#/components/schemas/{name}"
    )
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": f"Slipstream {role}",
            "version": slipstream.__version__,
            "description": "Serves generative recommenders.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "apiKey", "in": "header", "name": KEY_HEADER}},
        },
        "security": [{"key": []}],
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    content: dict[str, Any]
    if endpoint.answer in (str, HTML):
        media = "text/html" if endpoint.answer == HTML else "text/plain"
        content = {media: {"schema": {"type": "string"}}}
    else:
        content = {"application/json": {"schema": _reference(endpoint.answer)}}
    responses: dict[str, Any] = {
        str(endpoint.status): {"description": endpoint.summary, "content": content}
    }
    always = () if endpoint.open else (400, 401, 403, 408, 413, 429, 503)
    of_body = (415,) if endpoint.request is not None else ()
    for status in sorted({*always, *of_body, *endpoint.problems}):
        schema = _reference(m.HealthAnswer if endpoint.open else m.Problem)
        responses[str(status)] = {
            "description": MEANING[status],
            "content": {"application/json": {"schema": schema}},
        }
    operation: dict[str, Any] = {
        "operationId": endpoint.name,
        "summary": endpoint.summary,
        "responses": responses,
    }
    if endpoint.request is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {
                "application/json": {
                    "schema": _reference(endpoint.request),
                    "example": endpoint.example,
                }
            },
        }
    parameters = _parameters(endpoint)
    if parameters:
        operation["parameters"] = parameters
    if endpoint.open:
        operation["security"] = []
    return operation


def _parameters(endpoint: Endpoint) -> list[dict[str, Any]]:
    parameters: list[dict[str, Any]] = []
    if "{user}" in endpoint.path:
        schema = {"type": "string", "minLength": 1, "maxLength": 256}
        parameters.append({"name": "user", "in": "path", "required": True, "schema": schema})
    for name, schema in endpoint.query.items():
        parameters.append({"name": name, "in": "query", "required": False, "schema": schema})
    if endpoint.timed:
        schema = {"type": "number", "exclusiveMinimum": 0, "maximum": 60000}
        about = "Milliseconds from now within which the answer is worth having."
        parameters.append(
            {
                "name": DEADLINE_HEADER,
                "in": "header",
                "required": False,
                "schema": schema,
                "description": about,
            }
        )
    return parameters


def _reference(part: Any) -> dict[str, Any]:
    if part is dict:
        return {"type": "object"}
    return {"$ref": f"#/components/schemas/{part.__name__}"}
