"""API keys: who may call, what for, as which tenant, how often.

A key is a line of text: the secret, then what it may do.

    3f0c…e1                                 a client: ranks, appends, reads users
    9a77…04 tenant=shop rate=200            a client of the tenant `shop`, 200 requests per second
    c2d1…5b role=admin                      may do everything, and drain and reload
    77e0…9f role=metrics                    reads /metrics only

Touch this when a key can say something else.
"""

import hashlib
import hmac
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast, get_args

from slipstream.errors import SlipstreamError
from slipstream.serving.tenants import check_tenant

KeyRole = Literal["client", "metrics", "admin"]
MIN_KEY_CHARACTERS = 16
MAX_KEYS = 10_000
_FIELD = re.compile(r"\s+(role|tenant|rate)=(\S*)$")


@dataclass(frozen=True)
class ApiKey:
    """One key; without a tenant it sees the users that belong to none."""

    secret: str = field(repr=False)
    role: KeyRole = "client"
    tenant: str | None = None
    rate: float | None = None  # requests per second; the server's --rate unless given

    def may(self, needed: KeyRole) -> bool:
        """Whether the key opens an endpoint; figures of all are not shown to a tenant."""
        if self.role == "admin" or self.role == needed:
            return True
        return needed == "metrics" and self.role == "client" and self.tenant is None


def parse_key(line: str) -> ApiKey:
    """Read one line; the error does not repeat the secret."""
    fields: dict[str, str] = {}
    while found := _FIELD.search(line):
        if found[1] in fields:
            raise SlipstreamError(f"a line of API keys says {found[1]}= twice; say it once")
        fields[found[1]] = found[2]
        line = line[: found.start()]
    secret = line.strip()
    if len(secret) < MIN_KEY_CHARACTERS:
        raise SlipstreamError(
            f"an API key has at least {MIN_KEY_CHARACTERS} characters; make one with `openssl rand "
            "-hex 16`"
        )
    if "," in secret or not secret.isascii() or not secret.isprintable():
        raise SlipstreamError("API keys are printable ASCII without commas")
    role = fields.get("role", "client")
    if role not in get_args(KeyRole):
        raise SlipstreamError(f"role={role} is none of {', '.join(get_args(KeyRole))}")
    tenant = fields.get("tenant")
    if tenant is not None:
        check_tenant(tenant)
        if role != "client":
            raise SlipstreamError(f"a key of role {role} has no tenant; leave tenant={tenant} away")
    return ApiKey(secret, cast(KeyRole, role), tenant, _rate(fields.get("rate")))


def _rate(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0.001 <= rate <= 1e9:
        raise SlipstreamError(f"rate={text} is no number of requests per second, like rate=50")
    return rate


def parse_keys(lines: Sequence[str]) -> tuple[ApiKey, ...]:
    """Read lines of keys; empty ones and those that begin with # say nothing."""
    told = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if len(told) > MAX_KEYS:
        raise SlipstreamError(f"{len(told)} API keys are more than the {MAX_KEYS} allowed")
    keys = tuple(map(parse_key, told))
    if len({key.secret for key in keys}) < len(keys):
        raise SlipstreamError("an API key stands twice; every line has a secret of its own")
    return keys


def read_secret_file(path: Path, noun: str) -> str:
    """Return the text of a file with secrets; refuse one that every user can read."""
    try:
        with path.open(encoding="utf-8") as file:
            mode, text = stat.S_IMODE(os.fstat(file.fileno()).st_mode), file.read(1 << 24)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise SlipstreamError(f"the {noun} {path} cannot be read: {reason}") from error
    if mode & 0o007:
        raise SlipstreamError(f"every user can read the {noun} {path}; run `chmod 600 {path}`")
    return text


def read_key_file(path: Path) -> tuple[str, ...]:
    """Return the lines of a key file, checked."""
    lines = tuple(read_secret_file(path, "key file").splitlines())
    if not parse_keys(lines):
        raise SlipstreamError(f"the key file {path} holds no key; write one per line")
    return lines


class Keys:
    """The API keys a server accepts; without any, it accepts every request (on loopback).

    Keys are found by a digest under a secret of this process, so the time to find one tells
    nothing about it.
    """

    def __init__(self, keys: Sequence[ApiKey] = ()) -> None:
        self._salt = os.urandom(32)
        self._by_digest = {
            self._digest(key.secret.encode()): (number, key) for number, key in enumerate(keys)
        }

    def __bool__(self) -> bool:
        return bool(self._by_digest)

    def __len__(self) -> int:
        return len(self._by_digest)

    def accept(self, offered: bytes | None) -> tuple[int, ApiKey] | None:
        """Return the number of the key offered and the key; None where it is none of ours."""
        found = self._by_digest.get(self._digest(offered or b""))
        if found is None or not hmac.compare_digest(found[1].secret.encode(), offered or b""):
            return None
        return found

    def _digest(self, secret: bytes) -> bytes:
        return hashlib.blake2b(secret, digest_size=16, key=self._salt).digest()
