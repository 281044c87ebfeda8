"""What a router learns by probing, and what it says about it."""

import pytest

from slipstream.serving.http.membership import Membership, PeerReader
from slipstream.serving.router.peers import InstanceAddress
from tests.support.fake_instances import FakeInstance, log_lines, on_a_loop, reply, serving, until


class StrictInstance(FakeInstance):
    """Refuses every key."""

    async def _serve(self, reader, writer):
        while await reader.readuntil(b"\r\n\r\n"):
            await reply(writer, 401, {"error": "unauthorized", "detail": "no"})


@on_a_loop
async def test_an_instance_that_drains_or_has_a_backlog_says_so():
    async with serving(1) as face:
        (fake,) = face.fakes.values()
        fake.draining, fake.backlog = True, 17
        await until(lambda: face.state(fake).draining and face.state(fake).reported == 17)
        fake.draining = False
        await until(lambda: face.state(fake).usable(0.0))
        assert face.router.probes.statuses["i-0"].version == "v"


def test_an_instance_of_another_cluster_is_said_once(monkeypatch: pytest.MonkeyPatch):
    lines = log_lines(monkeypatch)
    probe_a_stranger()
    assert lines[1:] == [
        "instance b-i-0 refuses the key of this router; is it of the same cluster?"
    ]


@on_a_loop
async def probe_a_stranger() -> None:
    async with serving(1) as face:
        stranger = StrictInstance("b-i-0")
        await stranger.start()
        url = f"http://127.0.0.1:{stranger.port}"
        Membership(face.router, PeerReader([])).apply([InstanceAddress("b-i-0", url)])
        await until(lambda: face.router.probes._missed["b-i-0"] > 5)
        assert not face.state(stranger).ready
        stranger.stop()


def test_two_instances_with_one_name_are_said_once(monkeypatch: pytest.MonkeyPatch):
    lines = log_lines(monkeypatch)
    probe_a_namesake()
    assert lines[1:] == ["instances other and i-0 are both called i-0; use another --machine"]


@on_a_loop
async def probe_a_namesake() -> None:
    async with serving(1) as face:
        url = face.router.balancer.by_name["i-0"].url
        Membership(face.router, PeerReader([])).apply([InstanceAddress("other", url)])
        probes = face.router.probes
        await until(lambda: "other" in probes.statuses)
        for _ in range(3):
            await probes.probe(face.router.balancer.by_name["other"])
        assert probes.owner("i-0") == "i-0" and probes.owner("unknown") == "unknown"
