"""The router benchmark drives a real router before real workers."""

import asyncio
import itertools
import secrets

import pytest

from benchmarks.router import bench
from benchmarks.router.peers import cpu_seconds, our_router, workers
from slipstream.errors import SlipstreamError


@pytest.fixture(scope="module")
def deployment():
    """A worker, a router, and the secret of its tickets."""
    secret = secrets.token_hex(16)
    with workers(1) as ports, our_router(ports, secret) as (pid, port):
        yield secret, pid, port


def test_every_request_is_answered_and_its_processor_time_can_be_read(deployment):
    secret, pid, port = deployment
    before = cpu_seconds(pid)
    asyncio.run(bench.drive(port, bench.our_requests(port, secret), 40))
    assert cpu_seconds(pid) >= before


def test_a_refused_request_ends_the_benchmark(deployment):
    _, _, port = deployment
    request = bench._request(port, "/v1/rank", {"user": "u"}, "x-api-key: wrong")
    with pytest.raises(SlipstreamError, match="a router answered 4"):
        asyncio.run(bench.drive(port, [request], 1))


def test_the_peer_gets_the_same_ids_and_a_routing_key():
    requests = bench.peer_requests(80)
    assert len(requests) == bench.USERS
    assert b"x-smg-routing-key: user-0" in requests[0] and b'"input_ids":[1000,' in requests[0]


def test_without_the_peer_nothing_is_claimed(monkeypatch, capsys):
    async def drive(port, requests, count):
        assert count == 1_000

    monkeypatch.setattr(bench, "peer_command", lambda: None)
    monkeypatch.setattr(bench, "drive", drive)
    monkeypatch.setattr(bench, "cpu_seconds", lambda pid, clock=itertools.count(): next(clock))
    result = bench.run(True, None)
    assert result["claims"] == {}
    assert [row["variant"] for row in result["rows"]] == ["slipstream"]
    assert "sglang-router is not installed" in capsys.readouterr().out
