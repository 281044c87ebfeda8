"""The router's process: `python -m slipstream.serving.http.router_process SETTINGS`. Starts in well
under a second: no torch here.
"""

import os
import sys

import msgspec

from slipstream.serving.http.limits import Keys, Limits
from slipstream.serving.http.process import (
    INSTANCE_KEY_VARIABLE,
    KEYS_VARIABLE,
    ProcessSettings,
    keys_from_environment,
    run_app,
    secret_from_environment,
)
from slipstream.serving.http.router_app import RouterSettings, build_router
from slipstream.serving.router.routing import Member, Pool
from slipstream.serving.router.ticket import TicketOffice


class MemberSettings(msgspec.Struct):
    """An instance to route to."""

    name: str
    url: str
    pool: Pool = "any"


class RouterProcessSettings(ProcessSettings, kw_only=True):
    """One router: its instances and its limits."""

    members: list[MemberSettings]
    max_body_bytes: int = 4 * 2**20
    deadline_ms: float = 1_000.0
    requests_per_second: float | None = None
    burst: int = 100
    load_factor: float = 1.25
    slack_tokens: int = 1_024
    long_from: int | None = None
    probe_seconds: float = 0.25


def main(text: str) -> None:
    """Serve until told to stop."""
    settings = msgspec.json.decode(text, type=RouterProcessSettings)
    limits = Limits(
        max_body_bytes=settings.max_body_bytes,
        deadline_ms=settings.deadline_ms,
        requests_per_second=settings.requests_per_second,
        burst=settings.burst,
    )
    members = [Member(member.name, member.url, member.pool) for member in settings.members]
    app = build_router(
        members,
        TicketOffice(secret_from_environment()),
        Keys(keys_from_environment(KEYS_VARIABLE)),
        limits,
        RouterSettings(os.environ.get(INSTANCE_KEY_VARIABLE, ""), settings.probe_seconds),
        load_factor=settings.load_factor,
        slack_tokens=settings.slack_tokens,
        long_from=settings.long_from,
    )
    run_app(app, settings, lambda: None)


if __name__ == "__main__":
    main(sys.argv[1])
