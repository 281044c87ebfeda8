"""A deployment on several machines: its key, this machine's name, where its instances listen.

All machines of a cluster have one key, from the environment or a file, never from a command line.
Two secrets are derived from it: the key by which instances know their routers, and the one that
signs tickets, so every machine honours the tickets of every other. Touch this when machines share
something else; router/peers.py finds the instances of other machines.
"""

import hmac
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.errors import SlipstreamError
from slipstream.serving.http.api_keys import read_secret_file
from slipstream.serving.router.peers import PeersFile, parse_source

CLUSTER_KEY_VARIABLE = "SLIPSTREAM_CLUSTER_KEY"
MIN_KEY_CHARACTERS = 32
_MACHINE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,47}")


@dataclass(frozen=True)
class ClusterConfig:
    """This machine's part of a cluster."""

    key: str = field(repr=False)
    machine: str
    listen: tuple[str, int] | None = None  # of the first instance; the next has the next port
    peers: tuple[str, ...] = ()  # files, or dns:NAME:PORT

    def instance_key(self) -> str:
        """Return the key that routers send and instances want."""
        return self._derive("instances")

    def ticket_secret(self) -> str:
        """Return the secret that signs tickets."""
        return self._derive("tickets")

    def _derive(self, purpose: str) -> str:
        return hmac.digest(self.key.encode(), f"slipstream {purpose}".encode(), "sha256").hex()


def read_cluster(
    *,
    listen: str | None,
    peers: Sequence[str],
    machine: str | None,
    key_file: Path | None,
    history: str,
    instances: int,
    routers: int,
) -> ClusterConfig | None:
    """Check the flags about several machines; None where this one is alone."""
    if instances == 0 and not peers:
        raise SlipstreamError("--instances 0 needs --peers: a router without instances is no use")
    if routers == 0 and listen is None:
        raise SlipstreamError(
            "--routers 0 needs --listen-instances: nothing else would reach the instances"
        )
    if instances == 0 and (listen is not None or routers == 0):
        raise SlipstreamError("--instances 0 leaves nothing to listen; run routers, with --peers")
    if listen is None and not peers:
        if machine is not None or key_file is not None:
            raise SlipstreamError(
                "--machine and --cluster-key-file are for --listen-instances and --peers"
            )
        return None
    if instances and history.startswith("sqlite:"):
        raise SlipstreamError(
            "machines cannot share a history in SQLite; give all of them the same --history "
            "redis://HOST:PORT/DB"
        )
    for text in peers:
        source = parse_source(text)
        if isinstance(source, PeersFile):
            source.read()
    return ClusterConfig(
        _read_key(key_file),
        _machine_name(machine),
        None if listen is None else parse_listen(listen, instances),
        tuple(_absolute(text) for text in peers),
    )


def describe_peers(peers: Sequence[str]) -> list[str]:
    """Return a sentence for each source of peers; refuse one that cannot be read now."""
    found = []
    for text in peers:
        source = parse_source(text)
        found.append(f"peers: {len(source.read())} instances of {source.source}")
    return found


def _read_key(key_file: Path | None) -> str:
    """Return the key of the cluster; refuse to be reached by other machines without one."""
    key = os.environ.get(CLUSTER_KEY_VARIABLE, "")
    if key_file is not None:
        key = read_secret_file(key_file, "cluster key")
    key = key.strip()
    if not key:
        raise SlipstreamError(
            f"several machines need a cluster key; set ${CLUSTER_KEY_VARIABLE} or give "
            "--cluster-key-file, the same on all of them (openssl rand -hex 32)"
        )
    if len(key) < MIN_KEY_CHARACTERS or not key.isascii() or not key.isprintable():
        raise SlipstreamError(
            f"a cluster key is one line of at least {MIN_KEY_CHARACTERS} ASCII characters; make "
            "one with `openssl rand -hex 32`"
        )
    return key


def _machine_name(given: str | None) -> str:
    if given is None:
        host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:48]
        return host if _MACHINE.fullmatch(host) else f"m{host}"[:48]
    if not _MACHINE.fullmatch(given):
        raise SlipstreamError(
            f"--machine {given[:60]} is no name of a machine; use up to 48 letters, digits and . _ "
            "-"
        )
    return given


def parse_listen(text: str, instances: int) -> tuple[str, int]:
    """Read HOST:PORT, of IPv6 [HOST]:PORT, where instances listen on consecutive ports."""
    host, _, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    number = int(port) if port.isascii() and port.isdigit() and len(port) < 6 else -1
    if not bare or (":" in bare and host == bare) or number < 0:
        raise SlipstreamError(f"'{text}' is no address; write --listen-instances HOST:PORT")
    if number + instances - 1 > 65_535:
        raise SlipstreamError(f"{instances} instances need as many ports from {number} on")
    return bare, number


def _absolute(text: str) -> str:
    """Return a source of peers as processes with another directory read it."""
    return str(Path(text).absolute()) if isinstance(parse_source(text), PeersFile) else text
