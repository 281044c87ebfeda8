"""The process of one router: `python -m slipstream.serving.http.router_process SETTINGS`.

It starts in well under a second, because nothing here imports torch. Touch this when a router gets
another setting.
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
from slipstream.serving.http.router_app import Router, build_router
from slipstream.serving.router.balancer import InstanceState, LoadBalancer, Pool
from slipstream.serving.router.ticket import TicketSigner


class InstanceAddress(msgspec.Struct):
    """An instance to send requests to."""

    name: str
    url: str
    pool: Pool = "any"


class RouterSettings(ProcessSettings, kw_only=True):
    """The settings of one router: its instances and its limits."""

    instances: list[InstanceAddress]
    max_body_bytes: int = 4 * 2**20
    deadline_ms: float = 1_000.0
    requests_per_second: float | None = None
    burst: int = 100
    load_factor: float = 1.25
    slack_tokens: int = 1_024
    long_from: int | None = None
    probe_seconds: float = 0.25


def main(text: str) -> None:
    """Serve until SIGTERM or SIGINT."""
    settings = msgspec.json.decode(text, type=RouterSettings)
    limits = Limits(
        max_body_bytes=settings.max_body_bytes,
        deadline_ms=settings.deadline_ms,
        requests_per_second=settings.requests_per_second,
        burst=settings.burst,
    )
    balancer = LoadBalancer(
        [InstanceState(address.name, address.url, address.pool) for address in settings.instances],
        load_factor=settings.load_factor,
        slack_tokens=settings.slack_tokens,
        long_from=settings.long_from,
    )
    router = Router(
        balancer,
        TicketSigner(secret_from_environment()),
        limits,
        instance_key=os.environ.get(INSTANCE_KEY_VARIABLE, ""),
        probe_seconds=settings.probe_seconds,
    )
    app = build_router(router, Keys(keys_from_environment(KEYS_VARIABLE)), limits)
    run_app(app, settings, lambda: None)


if __name__ == "__main__":
    main(sys.argv[1])
