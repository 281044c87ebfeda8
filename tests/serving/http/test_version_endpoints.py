"""A change of versions reaches every instance or none, whatever fails on the way."""

import asyncio

import msgspec
import pytest

from slipstream.serving.http import messages as m
from slipstream.serving.http.http_app import HttpProblem
from slipstream.serving.http.version_endpoints import VersionEndpoints
from slipstream.serving.http.version_messages import (
    PrepareAnswer,
    PrepareRequest,
    RollbackRequest,
    TrafficRequest,
    VersionsAnswer,
)
from slipstream.serving.versions import VersionRecord
from tests.support.serving_service import context


class Fleet:
    """Instances that keep a record; those called in `fails` refuse a path once."""

    def __init__(self, names: str = "abc") -> None:
        self.records = {name: VersionRecord("v1") for name in names}
        self.directory = dict.fromkeys(names, "v2")
        self.fails: dict[tuple[str, str], HttpProblem] = {}
        self.asked: list[tuple[str, str]] = []
        self.endpoints = VersionEndpoints(self.command, lambda: list(self.records))

    async def command(self, name: str, path: str, body: bytes, deadline: float) -> bytes:
        await asyncio.sleep(0)
        self.asked.append((name, path))
        if (name, path) in self.fails:
            raise self.fails.pop((name, path))
        if path == "GET /admin/versions":
            return msgspec.json.encode(VersionsAnswer({name: self.records[name]}))
        if path == "/admin/prepare":
            wanted = msgspec.json.decode(body, type=PrepareRequest).version
            assert wanted in (None, self.directory[name])
            return msgspec.json.encode(PrepareAnswer(self.directory[name]))
        record = msgspec.json.decode(body, type=VersionRecord)
        assert record.number > self.records[name].number, "an older record would be ignored"
        self.records[name] = record
        return b"{}"

    def serves(self) -> set[tuple[str, str | None, float]]:
        return {(each.stable, each.candidate, each.share) for each in self.records.values()}

    def reload(self, **request: object) -> m.ReloadAnswer:
        return asyncio.run(self.endpoints.reload(m.ReloadRequest(**request), context()))

    def traffic(self, **request: object) -> m.ReloadAnswer:
        return asyncio.run(self.endpoints.traffic(TrafficRequest(**request), context()))

    def rollback(self) -> m.ReloadAnswer:
        return asyncio.run(self.endpoints.rollback(RollbackRequest(), context()))


def test_a_reload_prepares_all_before_one_switches():
    fleet = Fleet()
    changed = fleet.reload(version="v2")
    assert changed.before == dict.fromkeys("abc", "v1")
    assert changed.after == dict.fromkeys("abc", "v2")
    paths = [path for _, path in fleet.asked if not path.startswith("GET")]
    assert paths == ["/admin/prepare"] * 3 + ["/admin/switch"] * 3


@pytest.mark.parametrize("path", ["/admin/prepare", "/admin/switch"])
def test_a_reload_that_fails_midway_leaves_all_on_the_version_before(path: str):
    fleet = Fleet()
    fleet.fails["b", path] = HttpProblem(502, "instance_failed", "instance 'b' did not answer")
    with pytest.raises(HttpProblem, match="instance 'b' did not answer") as refused:
        fleet.reload()
    assert refused.value.status == 502 and fleet.serves() == {("v1", None, 0.0)}
    assert ("serve version v1 again" in refused.value.detail) == (path == "/admin/switch")
    fleet.reload()
    assert fleet.serves() == {("v2", None, 0.0)}


def test_a_bundle_that_is_replaced_while_it_is_opened_changes_nothing():
    fleet = Fleet()
    fleet.directory["c"] = "v3"
    with pytest.raises(HttpProblem, match="replaced while instances opened it"):
        fleet.reload()
    assert fleet.serves() == {("v1", None, 0.0)}


def test_a_canary_grows_is_promoted_and_rolled_back():
    fleet = Fleet()
    with pytest.raises(HttpProblem, match="there is no candidate"):
        fleet.traffic(share=0.5)
    with pytest.raises(HttpProblem, match="no version to go back to"):
        fleet.rollback()
    fleet.reload(share=0.05, shadow=0.5)
    assert fleet.serves() == {("v1", "v2", 0.05)}
    fleet.traffic(share=0.2)
    assert fleet.serves() == {("v1", "v2", 0.2)}
    assert {record.shadow for record in fleet.records.values()} == {0.5}
    fleet.rollback()
    assert fleet.serves() == {("v1", None, 0.0)}
    fleet.reload(share=0.05)
    assert fleet.traffic(share=1.0).after == dict.fromkeys("abc", "v2")
    assert fleet.rollback().after == dict.fromkeys("abc", "v1")


def test_instances_that_differ_are_brought_together_by_the_next_reload():
    fleet = Fleet()
    fleet.records["a"] = VersionRecord("v0", number=7)
    fleet.reload()
    assert fleet.serves() == {("v2", None, 0.0)}


def test_all_instances_are_shown():
    shown = asyncio.run(Fleet().endpoints.versions(None, context()))
    assert shown.instances == dict.fromkeys("abc", VersionRecord("v1"))
