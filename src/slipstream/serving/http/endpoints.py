"""The HTTP interface as a table: every endpoint once.

The routes and the OpenAPI document are made from it. Touch this when an endpoint is added or
changes its path, message or status; the messages are in messages.py.
"""

import json
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

import slipstream
from slipstream.serving.http import messages as m

Role = Literal["instance", "router"]
KEY_HEADER, DEADLINE_HEADER, BACKLOG_HEADER = (
    "x-api-key",
    "x-slipstream-deadline-ms",
    "x-slipstream-backlog",
)

MEANING = {
    400: "The message is malformed, or asks for something this model does not know.",
    401: "The API key is missing or wrong.",
    403: "The ticket was not issued here for this user.",
    404: "Nothing is stored under this name.",
    409: "What is stored already does not let this follow.",
    410: "The ticket has expired.",
    413: "The body is too large.",
    429: "Too many requests, or refused to keep the promise to others; see Retry-After.",
    502: "The instance failed while it worked on this request.",
    503: "Not ready, draining, no instance is left, or the history store does not answer.",
    504: "The deadline passed.",
}


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
    timed: bool = False  # accepts the deadline header
    query: dict[str, dict[str, Any]] = field(default_factory=dict)
    example: dict[str, Any] | None = None  # a request, for the document and for who sent none


def no_body(endpoint: Endpoint) -> str:
    """Return the sentence that refuses an empty body."""
    return f"the request has no body; send JSON like {json.dumps(endpoint.example)}"


_FORWARDED = (429, 502, 503, 504)  # of every endpoint that a router forwards to an instance
ENDPOINTS = (
    Endpoint(
        "preinfer", "POST", "/v1/preinfer", "Compute a user's history before it is needed; "
        "returns a ticket for /v1/rank.",
        m.PreinferAnswer, m.PreinferRequest,
        status=202, problems=(403, 404, *_FORWARDED), timed=True,
        example={"user": "ann", "rank_in_ms": 120},
    ),
    Endpoint(
        "rank", "POST", "/v1/rank", "Score candidates for a user.",
        m.RankAnswer, m.RankRequest, problems=(403, 404, 410, *_FORWARDED), timed=True,
        example={"user": "ann", "candidates": [260, 1210, 480], "titles": True},
    ),
    Endpoint(
        "recommend", "POST", "/v1/recommend", "Retrieve items, drop those seen or excluded, "
        "rank the rest and return the best.",
        m.RecommendAnswer, m.RecommendRequest, problems=(404, *_FORWARDED), timed=True,
        example={"user": "ann", "count": 10, "titles": True},
    ),
    Endpoint(
        "events", "POST", "/v1/events", "Append behaviours to a user's stored history.",
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
        "status", "GET", "/v1/status", "The instance about itself.",
        m.StatusAnswer, roles=("instance",),
    ),
    Endpoint("healthz", "GET", "/healthz", "Is the process alive?", m.HealthAnswer, open=True),
    Endpoint(
        "readyz", "GET", "/readyz", "May it be sent requests?",
        m.HealthAnswer, open=True, problems=(503,),
    ),
    Endpoint("metrics", "GET", "/metrics", "Counters and gauges for Prometheus.", str),
    Endpoint(
        "drain", "POST", "/admin/drain", "Finish what is here and take nothing new.",
        m.DrainAnswer, m.DrainRequest, problems=(404, 502, 503, 504),
        example={"instance": "i-0"},
    ),
    Endpoint(
        "reload", "POST", "/admin/reload", "Open the bundle again and serve what is there now.",
        m.ReloadAnswer, m.ReloadRequest, problems=(409, 502, 503, 504), example={},
    ),
    Endpoint("openapi", "GET", "/openapi.json", "This document.", dict),
)  # fmt: skip


def openapi(role: Role) -> dict[str, Any]:
    """Make the OpenAPI 3.1 document of an instance or a router."""
    endpoints = [endpoint for endpoint in ENDPOINTS if role in endpoint.roles]
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
    content: dict[str, Any] = {"application/json": {"schema": _reference(endpoint.answer)}}
    if endpoint.answer is str:
        content = {"text/plain": {"schema": {"type": "string"}}}
    responses: dict[str, Any] = {
        str(endpoint.status): {"description": endpoint.summary, "content": content}
    }
    always = () if endpoint.open else (400, 401, 413, 429)
    for status in sorted({*always, *endpoint.problems}):
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
