"""The connections of a server: how many there may be, in all and of one peer, and which are late.

A peer is an address; of IPv6 it is the first 64 bits, because one machine may have all the others.
Touch this when connections are counted or bounded in another way; the bounds of one connection are
kept in bounded_protocol.py.
"""

import ipaddress
import resource
from collections import Counter
from typing import Protocol

import msgspec

RESERVED_FILES = 256  # for connections to instances, stores, libraries
TOO_MANY_OF_PEER, TOO_MANY = "connections_refused_peer", "connections_refused_total"


class ConnectionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of connections. Times are seconds; every one is finite."""

    total: int = 4_096
    per_peer: int = 256
    head_bytes: int = 32_768  # of a request: everything but its body
    headers: int = 128
    pipelined: int = 16  # requests that wait behind one another on a connection
    head_seconds: float = 10.0  # from the first byte of a request (or the connection) to its head
    body_seconds: float = 20.0  # from the head to the end of the body
    send_seconds: float = 30.0  # for a client that does not read its answer
    keep_alive_seconds: float = 75.0  # between two requests


class LateConnection(Protocol):
    """A connection with a moment at which something must have happened."""

    due: float

    def expire(self) -> None:
        """End it: what was due did not happen."""


class ConnectionTable:
    """Counts connections by peer, refuses too many, and ends those that are late."""

    def __init__(self, limits: ConnectionLimits | None = None) -> None:
        self.limits = limits or ConnectionLimits()
        self.counts: Counter[str] = Counter({TOO_MANY_OF_PEER: 0, TOO_MANY: 0})
        self._total = min(self.limits.total, _files_allowed() - RESERVED_FILES)
        self._of_peer: Counter[str] = Counter()
        self._all = 0
        self._open: set[LateConnection] = set()

    @property
    def open(self) -> int:
        """How many connections there are, those of a TLS handshake under way included."""
        return self._all

    def admit(self, peer: str | None) -> str | None:
        """Count a new connection: None where there is room, else the reason it is refused.

        Connections without a peer (Unix sockets) are bounded in all only.
        """
        reason = None
        if self._all >= self._total:
            reason = TOO_MANY
        elif peer is not None and self._of_peer[peer] >= self.limits.per_peer:
            reason = TOO_MANY_OF_PEER
        if reason is not None:
            self.counts[reason] += 1
            return reason
        self._all += 1
        if peer is not None:
            self._of_peer[peer] += 1
        return None

    def leave(self, peer: str | None) -> None:
        """Count the end of a connection that was admitted."""
        self._all -= 1
        if peer is not None:
            self._of_peer[peer] -= 1
            if not self._of_peer[peer]:
                del self._of_peer[peer]

    def watch(self, connection: LateConnection) -> None:
        """End this connection when it is late, until `unwatch`."""
        self._open.add(connection)

    def unwatch(self, connection: LateConnection) -> None:
        """Stop watching a connection."""
        self._open.discard(connection)

    def sweep(self, now: float) -> None:
        """End every connection that is late."""
        for connection in [each for each in self._open if each.due < now]:
            connection.expire()

    def figures(self) -> dict[str, float]:
        """Return counters and gauges for /metrics."""
        counted = {name: float(count) for name, count in self.counts.items()}
        return counted | {"connections": float(self._all), "peers": float(len(self._of_peer))}


def peer_of(address: object) -> str | None:
    """Return who a connection comes from; None for a Unix socket, whose address is no pair."""
    if not isinstance(address, tuple):
        return None
    host = str(address[0])
    if ":" not in host:
        return host
    found = ipaddress.IPv6Address(host.partition("%")[0])
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.IPv6Network((found, 64), strict=False))


def raise_file_limit() -> None:
    """Allow this process as many open files as it may have: connections are files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = max(soft, 65_536)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _files_allowed() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**31 if soft == resource.RLIM_INFINITY else soft
