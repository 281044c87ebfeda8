"""The gate: keys and their roles, rates, pages of other sites, bodies; refusals are counted."""

import asyncio
from typing import Any

import pytest

from slipstream.serving.http.api_keys import Keys, parse_keys
from slipstream.serving.http.gate import Gate
from slipstream.serving.http.http_app import CALLER, RequestMetrics, send_answer
from slipstream.serving.http.limits import Limits
from tests.support.asgi import Answer, ask

CLIENT, SHOP, METRICS, ADMIN = (f"{name} key of some length" for name in "cdma")
KEYS = Keys(
    parse_keys([CLIENT, f"{SHOP} tenant=shop", f"{METRICS} role=metrics", f"{ADMIN} role=admin"])
)


class Behind:
    """The app behind a gate: it keeps who called."""

    def __init__(self) -> None:
        self.callers: list[Any] = []
        self.waiting: asyncio.Event | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.callers.append(scope.get(CALLER))
        if self.waiting is not None:
            await self.waiting.wait()
        await send_answer(send, 200, [(b"content-type", b"application/json")], b"{}")


def gated(keys: Keys = KEYS, public: bool = True, **limits: Any) -> tuple[Gate, Behind]:
    behind, bounds = Behind(), Limits(**limits)
    return Gate(behind, keys, bounds, RequestMetrics(dict), public=public), behind


def call(gate: Gate, path: str = "/v1/rank", method: str = "POST", **headers: str) -> Answer:
    return asyncio.run(ask(gate, method, path, b"{}", **headers))


def test_without_the_key_only_open_paths_answer_and_refusals_are_counted():
    gate, behind = gated()
    for key in ("", "wrong", CLIENT[:-1], CLIENT + "x"):
        assert call(gate, x_api_key=key).status == 401
    assert call(gate, "/nowhere", x_api_key="wrong").status == 401
    assert not behind.callers
    assert call(gate, x_api_key=CLIENT).status == 200
    assert call(gate, "/healthz", "GET").status == 200
    text = gate._metrics.text().decode()
    assert 'slipstream_answers_total{endpoint="rank",status="401"} 4.0' in text
    assert 'slipstream_answers_total{endpoint="other",status="401"} 1.0' in text


@pytest.mark.parametrize(
    ("path", "method", "may"),
    [
        ("/v1/rank", "POST", {CLIENT, SHOP, ADMIN}),
        ("/v1/users/a/b", "DELETE", {CLIENT, SHOP, ADMIN}),
        ("/v1/export/ann", "GET", {CLIENT, SHOP, ADMIN}),
        ("/metrics", "GET", {CLIENT, METRICS, ADMIN}),
        ("/admin/drain", "POST", {ADMIN}),
        ("/admin/undrain", "POST", {ADMIN}),
        ("/admin/reload", "POST", {ADMIN}),
        ("/admin/reload", "GET", {ADMIN}),
        ("/openapi.json", "GET", {CLIENT, SHOP, ADMIN}),
    ],
)
def test_each_role_has_its_endpoints(path: str, method: str, may: set[str]):
    gate, _ = gated()
    for key in (CLIENT, SHOP, METRICS, ADMIN):
        answer = call(gate, path, method, x_api_key=key)
        assert answer.status == (200 if key in may else 403), (key, answer.content)


def test_a_tenants_key_acts_for_its_tenant_and_an_admin_for_any():
    gate, behind = gated()
    for key, named in ((CLIENT, "shop"), (SHOP, ""), (SHOP, "other"), (ADMIN, ""), (ADMIN, "shop")):
        assert call(gate, x_api_key=key, x_slipstream_tenant=named).status == 200
    assert [caller.tenant for caller in behind.callers] == [None, "shop", "shop", None, "shop"]
    assert call(gate, x_api_key=ADMIN, x_slipstream_tenant="a/b").status == 400


def test_bodies_are_json_and_say_so():
    gate, behind = gated()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "", "application/jsonx"):
        answer = call(gate, x_api_key=CLIENT, content_type=kind)
        assert (answer.status, answer.content["error"]) == (415, "unsupported_media_type")
    assert not behind.callers
    for kind in ("application/json", "Application/JSON; charset=utf-8"):
        assert call(gate, x_api_key=CLIENT, content_type=kind).status == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "localhost:8000"}, 200),
        ({"host": "127.0.0.1:8000"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"host": "LOCALHOST"}, 200),
        ({"host": "evil.example"}, 403),  # a name that was made to point to 127.0.0.1
        ({"host": "localhost.evil.example:8000"}, 403),
        ({"host": ""}, 403),
        ({"host": "localhost:8000", "origin": "http://localhost:8000"}, 200),
        ({"host": "localhost:8000", "origin": "http://localhost:9000"}, 403),
        ({"host": "localhost:8000", "origin": "https://evil.example"}, 403),
        ({"host": "localhost:8000", "origin": "null"}, 403),
    ],
)
def test_without_keys_only_this_machines_own_pages_are_answered(
    headers: dict[str, str], status: int
):
    gate, _ = gated(Keys())
    answer = call(gate, "/admin/drain", **headers)
    assert answer.status == status
    assert call(gated(Keys(), public=False)[0], **headers).status == 200
    assert call(gated()[0], x_api_key=CLIENT, **headers).status == 200


def test_a_key_above_its_rate_is_told_when_to_come_back():
    gate, _ = gated(requests_per_second=0.001, burst=2)
    answers = [call(gate, x_api_key=CLIENT) for _ in range(3)]
    assert [answer.status for answer in answers] == [200, 200, 429]
    assert answers[2].content["error"] == "rate_limited"
    assert int(answers[2].headers["retry-after"]) >= 1
    assert call(gate, x_api_key=SHOP).status == 200
    text = gate._metrics.text().decode()
    assert 'slipstream_answers_total{endpoint="rank",status="429"} 1.0' in text


def test_too_many_large_bodies_at_once_are_refused_and_room_is_given_back():
    gate, behind = gated(max_body_bytes=100, all_bodies_bytes=250)

    async def scenario() -> None:
        behind.waiting = asyncio.Event()
        large = {"x_api_key": CLIENT, "content_length": "100"}
        running = [
            asyncio.create_task(ask(gate, "POST", "/v1/rank", b"", **large)) for _ in range(2)
        ]
        await asyncio.sleep(0)
        refused = await ask(gate, "POST", "/v1/rank", b"", **large)
        assert (refused.status, refused.content["error"]) == (503, "overloaded")
        small = ask(gate, "POST", "/v1/rank", b"", x_api_key=CLIENT, content_length="50")
        behind.waiting.set()
        assert (await small).status == 200
        assert [(await each).status for each in running] == [200, 200]
        assert (await ask(gate, "POST", "/v1/rank", b"", **large)).status == 200

    asyncio.run(scenario())
