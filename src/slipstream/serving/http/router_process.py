"""The process of one router: `python -m slipstream.serving.http.router_process -`.

It starts in well under a second, because nothing here imports torch. Touch this when a router gets
another setting.
"""

import os
import sys
from pathlib import Path

import msgspec
from starlette.types import ASGIApp

from slipstream.serving.http.gate import LOOPBACK_NAMES
from slipstream.serving.http.limits import Limits, RateLimit
from slipstream.serving.http.membership import PeerReader
from slipstream.serving.http.page_files import PageFiles
from slipstream.serving.http.process import (
    INSTANCE_KEY_VARIABLE,
    ProcessSettings,
    keys_from_environment,
    open_table,
    read_settings,
    run_app,
    secret_from_environment,
)
from slipstream.serving.http.router_app import Router, build_router
from slipstream.serving.router.balancer import InstanceState, LoadBalancer
from slipstream.serving.router.peers import InstanceAddress, parse_source
from slipstream.serving.router.ticket import TicketSigner


class RouterSettings(ProcessSettings, kw_only=True):
    """The settings of one router: its instances and its limits."""

    instances: list[InstanceAddress]
    # Files, or dns:NAME:PORT, of instances on other machines
    peers: list[str] = msgspec.field(default_factory=list)
    peers_kept: str | None = None  # file of the last good list of them
    max_body_bytes: int = 4 * 2**20
    deadline_ms: float = 1_000.0
    requests_per_second: float | None = None
    burst: int = 100
    rate_file: str | None = None  # shared by the routers of a machine
    load_factor: float = 1.25
    slack_behaviours: int = 1_024
    long_from: int | None = None
    affinity: bool = True
    alone: bool = False  # no other router serves the same instances
    probe_seconds: float = 0.25
    allow_kill: bool = False
    page: str | None = None  # directory of the web page
    metrics_file: str | None = None  # where its counts are shared with the other routers


def main(argument: str) -> None:
    """Serve until SIGTERM or SIGINT; `-` reads the settings from stdin."""
    settings = read_settings(argument, RouterSettings)
    limits = Limits(
        max_body_bytes=settings.max_body_bytes,
        deadline_ms=settings.deadline_ms,
        requests_per_second=settings.requests_per_second,
        burst=settings.burst,
    )
    balancer = LoadBalancer(
        [InstanceState(address.name, address.url, address.pool) for address in settings.instances],
        load_factor=settings.load_factor,
        slack_behaviours=settings.slack_behaviours,
        long_from=settings.long_from,
        affinity=settings.affinity,
        alone=settings.alone,
    )
    table = open_table(settings)
    router = Router(
        balancer,
        TicketSigner(secret_from_environment()),
        limits,
        instance_key=os.environ.get(INSTANCE_KEY_VARIABLE, ""),
        probe_seconds=settings.probe_seconds,
        connections=table,
        rates=RateLimit(limits, settings.rate_file),
        allow_kill=settings.allow_kill,
    )
    file = None if settings.metrics_file is None else Path(settings.metrics_file)
    hosts = LOOPBACK_NAMES | {settings.host.lower()}
    app: ASGIApp = build_router(
        router, keys_from_environment(), limits, file, hosts, _peer_reader(settings)
    )
    if settings.page is not None:
        app = PageFiles(Path(settings.page), app)
    run_app(app, settings, lambda: None, table)


def _peer_reader(settings: RouterSettings) -> PeerReader | None:
    if not settings.peers:
        return None
    kept = None if settings.peers_kept is None else Path(settings.peers_kept)
    return PeerReader([parse_source(text) for text in settings.peers], kept)


if __name__ == "__main__":
    main(sys.argv[1])
