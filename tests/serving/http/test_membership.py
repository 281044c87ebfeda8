"""Instances that join and leave a router while it serves."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.serving.http.membership import Membership, PeerReader
from slipstream.serving.router import peers as peers_module
from slipstream.serving.router.hashing import rendezvous_first, seed_of
from slipstream.serving.router.peers import InstanceAddress, PeersFile, PeersName
from tests.support.fake_instances import (
    RANK,
    SIGNER,
    Face,
    FakeInstance,
    answers,
    log_lines,
    on_a_loop,
    serving,
    until,
)


@contextlib.asynccontextmanager
async def with_peer(**settings: Any) -> AsyncIterator[tuple[Face, Membership, FakeInstance]]:
    """A router over i-0, which other fakes may join, and such a fake."""
    async with serving(1, **settings) as face:
        peer = FakeInstance(_preferred())
        await peer.start()
        face.fakes[peer.name] = peer
        yield face, Membership(face.router, PeerReader([])), peer
        peer.stop()


def _preferred() -> str:
    """A name that ann's order has before i-0."""
    names = (f"b-i-{number}" for number in range(100))
    return next(name for name in names if rendezvous_first("ann", ("i-0", name), seed_of) == name)


def address(fake: FakeInstance, **changes: Any) -> InstanceAddress:
    return InstanceAddress(
        changes.get("name", fake.name), f"http://127.0.0.1:{fake.port}", changes.get("pool", "any")
    )


async def has_left(face: Face, members: Membership, name: str, wanted: Any = ()) -> None:
    """Apply a list until an instance is gone, as the follower does."""

    def gone() -> bool:
        members.apply(wanted)
        return name not in face.router.balancer.by_name

    await until(gone)


@on_a_loop
async def test_a_listed_instance_is_probed_and_takes_its_users():
    async with with_peer() as (face, members, peer):
        assert await face.ask("/v1/rank", RANK) == (200, {"by": "i-0"})
        members.apply([address(peer)])
        assert not face.state(peer).ready
        assert await face.ask("/v1/rank", RANK) == (200, {"by": "i-0"})
        await until(lambda: face.state(peer).ready)
        assert await face.ask("/v1/rank", RANK) == (200, {"by": peer.name})


@on_a_loop
async def test_one_that_is_listed_no_more_finishes_its_requests_and_leaves_nothing_behind():
    async with with_peer() as (face, members, peer):
        members.apply([address(peer)])
        await until(lambda: face.state(peer).ready)
        released = asyncio.Event()

        async def slow(fake: FakeInstance, writer: asyncio.StreamWriter) -> None:
            await released.wait()
            await answers(fake, writer)

        peer.behaviour = slow
        under_way = asyncio.create_task(face.ask("/v1/rank", RANK))
        await until(lambda: len(peer.requests) == 1)
        members.apply([])
        members.apply([])
        status, fleet = await face.ask("/v1/fleet", b"", "GET")
        states = {each["name"]: each["state"] for each in fleet["instances"]}
        assert (status, states) == (200, {"i-0": "ready", peer.name: "draining"})
        assert await face.ask("/v1/rank", RANK) == (200, {"by": "i-0"})
        released.set()
        assert await under_way == (200, {"by": peer.name})
        await has_left(face, members, peer.name)
        router = face.router
        for kept in (router.upstreams, router.times, router.probes.statuses):
            assert set(kept) == {"i-0"}
        for hidden in ("_missed", "_tasks"):
            assert set(getattr(router.probes, hidden)) == {"i-0"}
        assert not any(peer.name in names for names in router.figures())
        assert len(peer.requests) == 1


@on_a_loop
async def test_many_instances_that_come_and_go_leave_nothing_behind():
    async with with_peer() as (face, members, peer):
        for number in range(20):
            name = f"guest-{number}"
            members.apply([address(peer, name=name)])
            await until(lambda name=name: face.router.balancer.by_name[name].ready)
            await has_left(face, members, name)
        probes = face.router.probes
        assert len(face.router.balancer.instances) == len(face.router.upstreams) == 1
        assert len(face.router.times) == len(probes.statuses) == len(probes._tasks) == 1
        assert not probes._own_names and not probes._told


@on_a_loop
async def test_one_that_is_listed_again_before_it_has_left_stays():
    async with with_peer() as (face, members, peer):
        members.apply([address(peer)])
        await until(lambda: face.state(peer).ready)
        state = face.state(peer)
        face.router.upstreams[peer.name]._busy += 1  # a request is under way
        members.apply([])
        assert state.leaving
        members.apply([address(peer)])
        face.router.upstreams[peer.name]._busy -= 1
        assert face.state(peer) is state and not state.leaving
        assert await face.ask("/v1/rank", RANK) == (200, {"by": peer.name})


@on_a_loop
async def test_one_that_changes_its_address_or_pool_comes_back_as_it_is_listed():
    async with with_peer() as (face, members, peer):
        members.apply([address(peer)])
        await until(lambda: face.state(peer).ready)
        before, changed = face.state(peer), [address(peer, pool="long")]

        def is_back() -> bool:
            members.apply(changed)
            state = face.router.balancer.by_name.get(peer.name)
            return state is not None and state is not before and state.ready

        await until(is_back)
        assert face.state(peer).pool == "long"


@on_a_loop
async def test_a_peer_with_the_name_of_an_own_instance_is_that_instance():
    async with with_peer() as (face, members, peer):
        own = face.router.balancer.by_name["i-0"]
        members.apply([address(peer, name="i-0")])
        assert face.router.balancer.instances == [own]
        members.apply([])
        assert face.router.balancer.instances == [own] and not own.leaving


@on_a_loop
async def test_a_ticket_finds_an_instance_that_is_listed_by_another_name():
    async with with_peer() as (face, members, peer):
        listed = "10.0.0.2:9000"
        names = (f"user-{number}" for number in range(100))
        user = next(u for u in names if rendezvous_first(u, ("i-0", listed), seed_of) == "i-0")
        members.apply([address(peer, name=listed)])
        await until(lambda: face.router.balancer.by_name[listed].ready)
        ticket = SIGNER.issue(user, peer.name, "v", 0, 3)
        for _ in range(3):
            answer = await face.ask("/v1/rank", {**RANK, "user": user, "ticket": ticket})
            assert answer == (200, {"by": peer.name})
        await has_left(face, members, listed)
        answer = await face.ask("/v1/rank", {**RANK, "user": user, "ticket": ticket})
        assert answer == (200, {"by": "i-0"})


@on_a_loop
async def test_without_any_instance_requests_are_refused_and_the_router_is_not_ready():
    async with serving(0) as face:
        assert (await face.ask("/v1/rank", RANK))[0] == 503
        assert (await face.ask("/readyz", b"", "GET"))[0] == 503
        assert (await face.ask("/v1/fleet", b"", "GET"))[1]["instances"] == []


@on_a_loop
async def test_the_sources_are_followed_while_the_router_serves(tmp_path: Path):
    async with with_peer() as (face, _, peer):
        path = tmp_path / "peers.yaml"
        path.write_text("[]")
        reader = PeerReader([PeersFile(path)])
        async with Membership(face.router, reader, 0.01).following():
            assert set(face.router.balancer.by_name) == {"i-0"}
            _replace(path, address(peer))
            await until(lambda: peer.name in face.router.balancer.by_name)
            await until(lambda: face.state(peer).ready)
            _replace(path)
            await until(lambda: peer.name not in face.router.balancer.by_name)


def _replace(path: Path, *listed: InstanceAddress) -> None:
    lines = [f"- {{name: {peer.name}, url: '{peer.url}'}}" for peer in listed]
    beside = path.with_suffix(".new")
    beside.write_text("\n".join(lines) or "[]")
    beside.replace(path)


def test_a_damaged_list_is_said_once_and_the_last_good_one_kept_even_by_the_next_router(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    lines = log_lines(monkeypatch)
    path, kept = tmp_path / "peers.yaml", tmp_path / "kept"
    one = InstanceAddress("b-i-0", "http://10.0.0.2:9000")
    _replace(path, one)
    reader = PeerReader([PeersFile(path)], kept)
    assert reader.read() == [one]
    path.write_text("- {")
    assert reader.read() == reader.read() == [one]
    assert len(lines) == 1 and "the last good list stays in use" in lines[0]
    assert PeerReader([PeersFile(path)], kept).read() == [one]
    assert PeerReader([PeersFile(path)]).read() == []
    _replace(path)
    assert reader.read() == []
    assert "is read again" in lines[-1]
    kept.write_bytes(b"damaged")
    path.unlink()
    assert PeerReader([PeersFile(path)], kept).read() == []


def test_sources_are_merged_and_the_first_has_its_way(tmp_path: Path):
    path = tmp_path / "peers.yaml"
    one = InstanceAddress("b-i-0", "http://10.0.0.2:9000")
    other = InstanceAddress("b-i-1", "http://10.0.0.2:9001")
    _replace(path, one, other)
    name = PeersName("b", 9000, lambda *_asked: ["10.0.0.2", "10.0.0.3"])
    found = PeerReader([PeersFile(path), name]).read()
    assert [peer.name for peer in found] == ["b-i-0", "b-i-1", "10.0.0.3:9000"]


def test_too_many_peers_of_all_sources_leave_the_list_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    lines = log_lines(monkeypatch)
    monkeypatch.setattr(peers_module, "MAX_PEERS", 2)
    path = tmp_path / "peers.yaml"
    one = InstanceAddress("b-i-0", "http://10.0.0.2:9000")
    other = InstanceAddress("b-i-1", "http://10.0.0.2:9001")
    _replace(path, one)
    name = PeersName("b", 9000, lambda *_asked: ["10.0.0.3"])
    reader = PeerReader([PeersFile(path), name])
    before = reader.read()
    assert len(before) == 2
    _replace(path, one, other)
    assert reader.read() == before
    assert "the list of all peers has 3 instances" in lines[-1]
