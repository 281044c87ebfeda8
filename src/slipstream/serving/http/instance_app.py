"""The ASGI app of an instance, its settings, and how both are served in a process.

Touch this when an instance gets a setting, or adds something to every answer.
"""

import contextlib
from pathlib import Path
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from slipstream.files import read_json
from slipstream.history.history_store import KEEP, open_history_store
from slipstream.ops.allocator import keep_freed_pieces
from slipstream.serving.bundle_pins import DESCRIPTION
from slipstream.serving.http.api_keys import Keys
from slipstream.serving.http.connection_table import ConnectionLimits
from slipstream.serving.http.endpoints import BACKLOG_HEADER
from slipstream.serving.http.gate import Gate
from slipstream.serving.http.http_app import RequestMetrics, build
from slipstream.serving.http.instance_lifecycle import OpenInstance
from slipstream.serving.http.instance_service import InstanceService
from slipstream.serving.http.limits import Limits
from slipstream.serving.http.process import (
    ProcessSettings,
    instance_keys,
    run_app,
    secret_from_environment,
)
from slipstream.serving.router.ticket import TicketSigner
from slipstream.serving.supervisor_socket import (
    SupervisedVersions,
    UnpinnedVersions,
    Versions,
)

# Its clients are routers. They close idle connections first: one that the instance closes counts
# as a failure.
OF_ROUTERS = ConnectionLimits(per_peer=4_096, keep_alive_seconds=300.0)


class InstanceSettings(ProcessSettings, kw_only=True):
    """One instance: its name, its bundles, where histories are; `model` is an `InstanceConfig`.

    With `retrieval`, that bundle retrieves what `bundle` ranks.
    """

    name: str
    bundle: str
    retrieval: str | None = None
    history: str
    shelf: str | None = None
    pinned: bool = False  # the supervisor pins versions; False: the bundle's directory decides
    keep: int = KEEP
    ticket_seconds: float = 60.0
    max_body_bytes: int = 4 * 2**20
    deadline_ms: float = 1_000.0
    allow_kill: bool = False
    model: dict[str, Any] = msgspec.field(default_factory=dict)
    connections: ConnectionLimits = OF_ROUTERS


class InstanceApp:
    """The shared routes, with the instance's backlog on every answer; closes it at the end."""

    def __init__(self, service: InstanceService, limits: Limits) -> None:
        self.service = service
        self.metrics = RequestMetrics(self._stats)
        self._app = build("instance", service.handlers(), limits, self.metrics)

    def _stats(self) -> dict[tuple[str, ...], float]:
        stats = self.service.stats()
        return {(f"instance_{name}",): value for name, value in stats.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return

        async def send_with_backlog(message: Any) -> None:
            if message["type"] == "http.response.start":
                backlog = b"%d" % self.service.life.instance.backlog
                message["headers"].append((BACKLOG_HEADER.encode(), backlog))
            await send(message)

        await self._app(scope, receive, send_with_backlog)

    async def _live(self, receive: Receive, send: Send) -> None:
        """Answer ASGI's lifespan: start at once, close the service at the end."""
        await receive()
        async with self.service.life.following():
            await send({"type": "lifespan.startup.complete"})
            await receive()
        with contextlib.suppress(Exception):
            await self.service.close()
        await send({"type": "lifespan.shutdown.complete"})


def build_instance(service: InstanceService, keys: Keys, limits: Limits) -> Gate:
    """Build an instance's app, ready for uvicorn."""
    app = InstanceApp(service, limits)
    return Gate(app, keys, limits, app.metrics, public=False)


def open_versions(settings: InstanceSettings) -> Versions:
    """Return what says which versions an instance serves."""
    if settings.pinned and settings.shelf is not None:
        return SupervisedVersions(Path(settings.shelf))
    places = [Path(each) for each in (settings.retrieval, settings.bundle) if each is not None]

    def read_version() -> str:
        return "+".join(str(read_json(place / DESCRIPTION)["version"]) for place in places)

    return UnpinnedVersions(read_version, places[-1])


def serve_instance(settings: InstanceSettings, open_instance: OpenInstance) -> None:
    """Serve what `open_instance` opens until a signal ends the process."""
    keep_freed_pieces()
    store = open_history_store(settings.history, settings.keep, patient=True)
    tickets = TicketSigner(secret_from_environment(), settings.ticket_seconds)
    service = InstanceService(
        settings.name,
        open_instance,
        store,
        tickets,
        open_versions(settings),
        settings.drain_seconds,
    )
    service.life.allow_kill = settings.allow_kill
    limits = Limits(max_body_bytes=settings.max_body_bytes, deadline_ms=settings.deadline_ms)
    app = build_instance(service, instance_keys(), limits)

    def start_draining() -> None:
        service.life.draining = service.life.ending = True

    run_app(app, settings, start_draining, is_alive=service.life.is_alive)
