"""Connections are counted by peer and in all, and the late ones are ended."""

import math
import resource

import pytest

from slipstream.serving.http import connection_table
from slipstream.serving.http.connection_table import (
    TOO_MANY,
    TOO_MANY_OF_PEER,
    ConnectionLimits,
    ConnectionTable,
    peer_of,
    raise_file_limit,
)


def test_a_peer_above_its_limit_is_refused_and_others_are_not():
    table = ConnectionTable(ConnectionLimits(total=5, per_peer=2))
    assert [table.admit("a") for _ in range(4)] == [None, None, *[TOO_MANY_OF_PEER] * 2]
    assert [table.admit("b"), table.admit(None), table.admit(None)] == [None] * 3
    assert table.admit("c") == TOO_MANY
    table.leave("a")
    assert (table.admit("a"), table.open) == (None, 5)
    figures = table.figures()
    assert (figures[TOO_MANY_OF_PEER], figures[TOO_MANY]) == (2.0, 1.0)
    assert (figures["connections"], figures["peers"]) == (5.0, 2.0)


def test_peers_that_left_are_forgotten():
    table = ConnectionTable()
    for number in range(10_000):
        peer = f"10.0.{number // 256}.{number % 256}"
        assert table.admit(peer) is None
        table.leave(peer)
    assert not table._of_peer and table.open == 0


def test_files_of_the_process_bound_all_connections(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (300, 300))
    table = ConnectionTable(ConnectionLimits(per_peer=1_000))
    admitted = [table.admit("a") for _ in range(300)].count(None)
    assert admitted == 300 - connection_table.RESERVED_FILES


@pytest.mark.parametrize(
    ("address", "peer"),
    [
        (("127.0.0.2", 5), "127.0.0.2"),
        (("2001:db8:1:2:3:4:5:6", 5, 0, 0), "2001:db8:1:2::/64"),
        (("2001:db8:1:2:ffff::1", 5, 0, 0), "2001:db8:1:2::/64"),
        (("::ffff:10.1.2.3", 5, 0, 0), "10.1.2.3"),
        (("fe80::1%eth0", 5, 0, 2), "fe80::/64"),
        ("", None),
        (b"", None),
    ],
)
def test_a_peer_is_an_address_or_the_network_of_one(address: object, peer: str | None):
    assert peer_of(address) == peer


def test_late_connections_are_ended_and_no_others():
    class Connection:
        def __init__(self, due: float) -> None:
            self.due, self.expired = due, 0

        def expire(self) -> None:
            self.expired += 1

    table = ConnectionTable()
    early, late, idle, gone = (Connection(due) for due in (9.0, 11.0, math.inf, 1.0))
    for connection in (early, late, idle, gone):
        table.watch(connection)
    table.unwatch(gone)
    table.sweep(10.0)
    assert [each.expired for each in (early, late, idle, gone)] == [1, 0, 0, 0]


def test_the_limit_of_files_is_raised_as_far_as_allowed():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[0] - 10, before[1]))
        raise_file_limit()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert soft == hard == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
