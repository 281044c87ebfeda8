"""Bodies, deadlines, metrics and refusals, the same for every endpoint."""

import asyncio
import json
from typing import Any

import pytest
from starlette.routing import Router

from slipstream.errors import SlipstreamError
from slipstream.history.history_store import AppendError, HistoryStoreError
from slipstream.serving.http import messages as m
from slipstream.serving.http.api_keys import Keys
from slipstream.serving.http.endpoints import ENDPOINTS
from slipstream.serving.http.gate import Gate
from slipstream.serving.http.http_app import RequestMetrics, build, problem_of
from slipstream.serving.http.limits import Limits
from slipstream.serving.request_errors import BadRequest, DeadlineError, OverloadError
from tests.support.asgi import Answer, ask

RANK = b'{"user": "u", "candidates": [1]}'


class Handlers(dict):
    """A handler for every endpoint that answers with what the test says, or raises it."""

    def __init__(self, answer: Any) -> None:
        self.seen: list[Any] = []

        async def handle(message: Any, context: Any) -> Any:
            self.seen.append((message, context))
            if isinstance(answer, Exception):
                raise answer
            return await answer() if callable(answer) else answer

        super().__init__({endpoint.name: handle for endpoint in ENDPOINTS})


def app(answer: Any = None, **limits: Any) -> tuple[Gate, Handlers]:
    handlers, bounds = Handlers(answer or m.HealthAnswer("ok")), Limits(**limits)
    metrics = RequestMetrics(lambda: {("queue length", "i-0"): 3.0}, ("instance",))
    built = build("instance", handlers, bounds, metrics)
    return Gate(built, Keys(), bounds, metrics), handlers


def post(gate: Gate, path: str = "/v1/rank", body: Any = RANK, **more: str) -> Answer:
    return asyncio.run(ask(gate, "POST", path, body, **more))


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (BadRequest("x"), 400, "bad_request"),
        (AppendError("x"), 409, "conflict"),
        (HistoryStoreError("no route to redis.internal"), 503, "store_unavailable"),
        (SlipstreamError("/srv/redis.internal/weights was changed"), 503, "unavailable"),
        (OverloadError("queue_full"), 429, "overloaded"),
        (OverloadError("draining"), 503, "draining"),
        (DeadlineError("x"), 504, "deadline_passed"),
        (TimeoutError(), 504, "deadline_passed"),
    ],
)
def test_every_refusal_has_its_status_and_code(error: Exception, status: int, code: str):
    gate, _ = app(error)
    answer = post(gate)
    assert (answer.status, answer.content["error"]) == (status, code)
    told = status in (429, 503) and code != "unavailable"
    assert (answer.headers.get("retry-after") == "1") == told
    assert "redis.internal" not in answer.content["detail"]


def test_operators_are_told_what_is_wrong_with_the_servers_files():
    gate, _ = app(SlipstreamError("/srv/weights was changed"))
    assert "weights" not in post(gate).content["detail"]
    answer = post(gate, "/admin/prepare", b"{}")
    assert (answer.status, answer.content["detail"]) == (503, "/srv/weights was changed")


def test_an_unexpected_failure_tells_the_client_nothing():
    problem = problem_of(RuntimeError("secret detail"))
    assert (problem.status, problem.code) == (500, "internal")
    assert "secret" not in problem.detail


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"{", 400, "truncated"),
        (b"[]", 400, "object"),
        (b'{"user": "u"}', 400, "candidates"),
        (b'{"user": "u", "candidates": [1], "histroy": {}}', 400, "unknown field"),
        (b'{"user": "u", "candidates": [9223372036854775808]}', 400, "<="),
        (b"1" * 101, 413, "limit of 100 bytes"),
        ([b"1" * 60, b"1" * 60, b"1" * 60], 413, "limit of 100 bytes"),
        ([b'{"user": "u", ', b'"candidates": [1]}'], 200, ""),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bodies_are_bounded_and_decoded(body: Any, status: int, says: str):
    gate, _ = app(max_body_bytes=100)
    answer = post(gate, body=body)
    assert answer.status == status
    assert status == 200 or says in answer.content["detail"].lower()


def test_an_empty_body_is_refused_with_an_example_of_its_endpoint():
    gate, handlers = app()
    asked = [e for e in ENDPOINTS if e.request is not None and "instance" in e.roles]
    for endpoint in asked:
        answer = post(gate, endpoint.path, b"")
        assert answer.status == 400
        assert answer.content["detail"].startswith("the request has no body; send JSON like {")
        example = json.loads(answer.content["detail"].partition("like ")[2])
        assert post(gate, endpoint.path, json.dumps(example).encode()).status != 400
    assert len(handlers.seen) == len(asked)


@pytest.mark.parametrize("user", ["ann", "a/b", "a//b/", "ü ö", "a%2Fb", "..", "line\nbreak\n"])
@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_a_user_in_a_path_may_have_any_name(method: str, user: str):
    gate, handlers = app()
    assert asyncio.run(ask(gate, method, f"/v1/users/{user}")).status == 200
    assert handlers.seen[0][1].path == {"user": user}


def test_an_announced_length_above_the_limit_is_refused_unread():
    gate, handlers = app(max_body_bytes=100)
    assert post(gate, content_length="101").status == 413
    assert not handlers.seen


def test_a_client_that_leaves_is_noticed_and_a_slow_one_refused():
    gate, _ = app(body_seconds=0.05)
    answer = post(gate, body=[])
    assert answer.status == 400 and "went away" in answer.content["detail"]

    async def slow() -> Answer:
        async def delayed(scope: Any, receive: Any, send: Any) -> None:
            async def trickle() -> Any:
                await asyncio.sleep(0.002)  # each part in time, the whole body never
                return {"type": "http.request", "body": b" ", "more_body": True}

            await gate(scope, trickle, send)

        return await ask(delayed, "POST", "/v1/rank", RANK)

    answer = asyncio.run(slow())
    assert (answer.status, answer.content["error"]) == (408, "timeout")


@pytest.mark.parametrize("value", ["0", "-5", "nan", "soon", "1e9"])
def test_a_deadline_that_makes_no_sense_is_refused(value: str):
    gate, handlers = app()
    answer = post(gate, x_slipstream_deadline_ms=value)
    assert answer.status == 400 and "milliseconds" in answer.content["detail"]
    assert not handlers.seen


def test_a_handler_that_overruns_the_deadline_is_ended():
    async def wait() -> None:
        await asyncio.Event().wait()

    gate, _ = app(wait)
    answer = post(gate, x_slipstream_deadline_ms="20")
    assert (answer.status, answer.content["error"]) == (504, "deadline_passed")


def test_unknown_paths_methods_and_parameters_are_refused():
    gate, _ = app()
    assert post(gate, "/v1/nothing").content["error"] == "not_found"
    assert post(gate, "/healthz").content["error"] == "method_not_allowed"
    answer = post(gate, query="limt=5")
    assert answer.status == 400 and "'limt'" in answer.content["detail"]
    assert asyncio.run(ask(gate, "GET", "/healthz", query="probe=1")).status == 200


def test_metrics_count_answers_and_show_the_servers_own_numbers():
    gate, _ = app()
    post(gate)
    post(gate, body=b"{")
    text = asyncio.run(ask(gate, "GET", "/metrics")).content
    for status in (200, 400):
        assert f'slipstream_answers_total{{endpoint="rank",status="{status}"}} 1.0' in text
    assert 'slipstream_queue_length{instance="i-0"} 3.0' in text


def test_the_document_names_every_endpoint():
    gate, _ = app()
    document = asyncio.run(ask(gate, "GET", "/openapi.json")).content
    assert {"/v1/rank", "/v1/preinfer", "/admin/switch"} <= document["paths"].keys()


def test_the_routing_decides_only_on_paths_with_a_parameter_and_on_refusals(
    monkeypatch: pytest.MonkeyPatch,
):
    gate, _ = app()
    routed: list[str] = []
    decide = Router.__call__

    async def note(self: Router, scope: Any, receive: Any, send: Any) -> None:
        routed.append(scope["path"])
        await decide(self, scope, receive, send)

    monkeypatch.setattr(Router, "__call__", note)
    assert post(gate).status == 200
    assert asyncio.run(ask(gate, "HEAD", "/healthz")).status == 200
    assert not routed
    assert asyncio.run(ask(gate, "GET", "/v1/users/ann")).status == 200
    assert asyncio.run(ask(gate, "GET", "/v1/rank")).headers["allow"] == "POST"
    assert routed == ["/v1/users/ann", "/v1/rank"]


@pytest.mark.parametrize(
    ("path", "media"),
    [
        ("/healthz", "application/json"),
        ("/metrics", "text/plain; version=0.0.4; charset=utf-8"),
        ("/docs", "text/html; charset=utf-8"),
    ],
)
def test_an_answer_tells_its_media_type_and_its_length(path: str, media: str):
    gate, _ = app()
    answer = asyncio.run(ask(gate, "GET", path))
    text = json.dumps(answer.content, separators=(",", ":")) if "json" in media else answer.content
    assert answer.headers["content-type"] == media
    assert int(answer.headers["content-length"]) == len(text.encode())
