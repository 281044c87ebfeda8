"""Peers: instances of other machines, as a file lists them or a DNS name resolves to them.

A peers file is YAML, a list of mappings, or JSON lines:

    - {name: b-i-0, url: "http://10.0.0.2:9000"}
    - {name: b-i-1, url: "http://10.0.0.2:9001", pool: long}

Behind `dns:NAME:PORT` every address of the name is an instance. A list that cannot be read, or is
too long, is a `PeersError`; its reader keeps the last good one. Touch this when peers are found in
another way; http/membership.py applies a list to a router.
"""

import json
import re
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from slipstream.errors import SlipstreamError
from slipstream.serving.clock import SYSTEM_CLOCK, Clock
from slipstream.serving.router.balancer import Pool

MAX_PEERS = 256
MAX_FILE_BYTES = 1 << 18
LOOKUP_SECONDS = 2.0  # a look-up that takes longer is given up; the last addresses stay
RESOLVE_SECONDS = 5.0  # between two look-ups of a name
DNS_PREFIX = "dns:"
_NAME = re.compile(r"[A-Za-z0-9._:\[\]-]{1,80}")


class PeersError(SlipstreamError):
    """The peers cannot be learnt now; one sentence says why."""


class InstanceAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An instance to send requests to."""

    name: str
    url: str
    pool: Pool = "any"


def check_peers(peers: Sequence[InstanceAddress], source: str) -> None:
    """Refuse too many peers, two alike, or one that has no usable name or address."""
    if len(peers) > MAX_PEERS:
        raise PeersError(f"{source} has {len(peers)} instances; a router takes {MAX_PEERS} at most")
    for peer in peers:
        if not _NAME.fullmatch(peer.name):
            raise PeersError(
                f"{source}: '{peer.name[:80]}' is no name of an instance; use up to 80 letters, "
                "digits and . _ : -"
            )
        if not _is_address(peer.url):
            raise PeersError(
                f"{source}: '{peer.url[:80]}' is not the address of {peer.name}; write it as "
                "http://HOST:PORT"
            )
    for field in ("name", "url"):
        values = [getattr(peer, field) for peer in peers]
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            raise PeersError(f"{source}: the {field} '{twice}' stands twice; list it once")


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        there = bool(parts.scheme == "http" and parts.hostname and parts.port)
    except ValueError:
        return False
    return there and not (parts.username or parts.path.strip("/") or parts.query)


def parse_peers(text: str, source: str) -> list[InstanceAddress]:
    """Read the text of a peers file, checked; `[]` is an empty list, an empty text is none."""
    try:
        if text.lstrip().startswith("{"):
            content: Any = [json.loads(line) for line in text.splitlines() if line.strip()]
        else:
            import yaml

            try:
                content = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise ValueError(" ".join(str(error).split())) from error
        if content is None:
            raise ValueError("it is empty; write [] for no peers")
        peers = msgspec.convert(content, list[InstanceAddress])
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise PeersError(f"{source} is not a list of peers: {error}") from error
    check_peers(peers, source)
    return peers


class PeersFile:
    """A file of peers, read again when it was replaced or changed."""

    def __init__(self, path: Path) -> None:
        self._path, self._stamp = path, (-1, -1, -1)
        self._peers: list[InstanceAddress] | PeersError = []
        self.source = f"the peers file {path}"

    def read(self) -> list[InstanceAddress]:
        """Return the peers; a file that stays the same is not read again."""
        try:
            about = self._path.stat()
            stamp = (about.st_ino, about.st_size, about.st_mtime_ns)
            if stamp != self._stamp:
                self._stamp, self._peers = stamp, self._parse()
        except OSError as error:
            raise PeersError(f"{self.source} cannot be read: {error.strerror}") from error
        if isinstance(self._peers, PeersError):
            raise self._peers
        return self._peers

    def _parse(self) -> list[InstanceAddress] | PeersError:
        with self._path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            return PeersError(f"{self.source} is larger than {MAX_FILE_BYTES >> 10} KiB")
        try:
            return parse_peers(data.decode(), self.source)
        except UnicodeDecodeError:
            return PeersError(f"{self.source} is not text")
        except PeersError as error:
            return error


def resolve(name: str, port: int) -> list[str]:
    """Return the addresses of a DNS name, sorted, as they stand in a URL."""
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    addresses = {(family, str(address[0])) for family, _, _, _, address in found}
    return sorted(f"[{host}]" if family == socket.AF_INET6 else host for family, host in addresses)


class PeersName:
    """A DNS name whose addresses are instances; it is resolved again every few seconds.

    A look-up runs in a thread of its own, because nothing ends one that hangs; there is never more
    than one.
    """

    def __init__(
        self,
        name: str,
        port: int,
        look_up: Callable[[str, int], list[str]] = resolve,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._name, self._port, self._look_up, self._clock = name, port, look_up, clock
        self._thread: threading.Thread | None = None
        self._peers: list[InstanceAddress] | PeersError | None = None
        self._due = 0.0
        self.source = f"the name {name}:{port}"

    def read(self) -> list[InstanceAddress]:
        """Return the instances at the name's addresses, as last resolved."""
        if self._thread is None and self._clock.now() >= self._due:
            self._thread = threading.Thread(target=self._resolve, daemon=True)
            self._thread.start()
        if self._thread is not None:
            self._thread.join(LOOKUP_SECONDS)
            if self._thread.is_alive():
                raise PeersError(f"{self.source} was not resolved within {LOOKUP_SECONDS:.0f} s")
            self._thread = None
            self._due = self._clock.now() + RESOLVE_SECONDS
        assert self._peers is not None
        if isinstance(self._peers, PeersError):
            raise self._peers
        return self._peers

    def _resolve(self) -> None:
        try:
            addresses = self._look_up(self._name, self._port)
            names = [f"{address}:{self._port}" for address in addresses]
            peers = [InstanceAddress(name, f"http://{name}") for name in names]
            check_peers(peers, self.source)
            self._peers = peers
        except PeersError as error:
            self._peers = error
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no name"
            self._peers = PeersError(f"{self.source} cannot be resolved: {reason}")


def parse_source(text: str) -> PeersFile | PeersName:
    """Read a value of --peers: a file, or `dns:NAME:PORT`."""
    if not text.startswith(DNS_PREFIX):
        return PeersFile(Path(text))
    name, _, port = text.removeprefix(DNS_PREFIX).rpartition(":")
    if not name or not (port.isascii() and port.isdigit() and 0 < int(port) < 65_536):
        raise SlipstreamError(f"'{text}' names no peers; write it as dns:NAME:PORT")
    return PeersName(name, int(port))
