"""Commands of operators to instances, and deletions that every instance confirms."""

import pytest

from slipstream.serving.http.api_keys import ApiKey, Keys
from slipstream.serving.router import upstream
from tests.support.fake_instances import KEY, FakeInstance, hangs_up, on_a_loop, reply, serving

DELETED = {"user": "ann", "deleted": 3}


@pytest.fixture(autouse=True)
def patient_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take long to connect."""
    monkeypatch.setattr(upstream, "CONNECT_SECONDS", 60.0)


async def deletes(fake: FakeInstance, writer) -> None:
    await reply(writer, 200, DELETED)


@on_a_loop
async def test_a_drained_instance_is_taken_back():
    async with serving() as face:
        fake = face.fakes["i-1"]
        status, answer = await face.ask("/admin/drain", {"instance": "i-1"})
        assert (status, answer) == (200, {"draining": "i-1"})
        assert fake.requests[-1][0] == "/admin/drain" and face.state(fake).draining
        fake.draining = True
        status, answer = await face.ask("/admin/undrain", {"instance": "i-1"})
        assert (status, answer) == (200, {"serving": "i-1"})
        assert fake.requests[-1][0] == "/admin/undrain"
        status, answer = await face.ask("/admin/undrain", {"instance": "i-9"})
        assert status == 404 and "there are i-0, i-1, i-2" in answer["detail"]


@on_a_loop
async def test_a_router_drains_and_serves_again():
    async with serving() as face:
        assert await face.ask("/admin/drain", {}) == (200, {"draining": "router"})
        assert (await face.ask("/readyz", b"", "GET"))[0] == 503
        assert await face.ask("/admin/undrain", {}) == (200, {"serving": "router"})
        assert (await face.ask("/readyz", b"", "GET"))[0] == 200


@on_a_loop
async def test_what_an_instance_refuses_or_loses_is_told_by_its_name():
    async with serving() as face:

        async def refuses(fake: FakeInstance, writer) -> None:
            await reply(writer, 409, {"error": "conflict", "detail": "about to end"})

        face.fakes["i-0"].behaviour = refuses
        status, answer = await face.ask("/admin/undrain", {"instance": "i-0"})
        assert (status, answer["detail"]) == (409, "instance 'i-0': about to end")
        face.fakes["i-0"].behaviour = hangs_up
        status, answer = await face.ask("/admin/undrain", {"instance": "i-0"})
        assert (status, answer["error"]) == (502, "instance_failed")


@on_a_loop
async def test_a_deletion_reaches_every_instance():
    async with serving() as face:
        for fake in face.fakes.values():
            fake.behaviour = deletes
        assert await face.ask("/v1/users/ann", b"", "DELETE") == (200, DELETED)
        for fake in face.fakes.values():
            assert {path for path, _, _ in fake.requests} == {"/v1/users/ann"}


@on_a_loop
async def test_a_deletion_that_an_instance_does_not_confirm_is_incomplete():
    async with serving() as face:
        for fake in face.order():
            fake.behaviour = deletes
        face.order()[-1].behaviour = hangs_up
        status, answer = await face.ask("/v1/users/ann", b"", "DELETE")
        assert (status, answer["error"]) == (503, "incomplete")
        assert "send the request again" in answer["detail"]
        face.order()[-1].behaviour = deletes
        assert (await face.ask("/v1/users/ann", b"", "DELETE"))[0] == 200


@on_a_loop
async def test_a_tenants_user_is_told_to_the_instance_and_has_its_own_place():
    keys = Keys([ApiKey(KEY, tenant="shop")])
    async with serving(keys=keys) as face:
        for path, method in (("/v1/users/ann", "GET"), ("/v1/users/ann", "DELETE")):
            assert (await face.ask(path, b"", method))[0] == 200
        assert (await face.ask("/v1/rank", {"user": "ann", "candidates": [1]}))[0] == 200
        asked = [fake for fake in face.fakes.values() if fake.requests]
        for fake in asked:
            assert all(sent["x-slipstream-tenant"] == "shop" for _, _, sent in fake.requests)
        first = face.order("shop␟ann")[0]
        assert {"/v1/rank", "/v1/users/ann"} <= {path for path, _, _ in first.requests}
        status, answer = await face.ask("/v1/rank", {"user": "shop␟ann", "candidates": [1]})
        assert status == 400 and "may not contain" in answer["detail"]
        status, _ = await face.ask("/admin/drain", {})
        assert status == 403
