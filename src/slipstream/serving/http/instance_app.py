"""The ASGI app of an instance, its settings, and how both are served in a process.

Touch this when an instance gets a setting, or adds something to every answer.
"""

import contextlib
import sys
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from slipstream.history.history_store import KEEP, open_history_store
from slipstream.serving.http.endpoints import BACKLOG_HEADER
from slipstream.serving.http.http_app import Gate, RequestMetrics, build
from slipstream.serving.http.instance_service import InstanceService, OpenInstance
from slipstream.serving.http.limits import Keys, Limits
from slipstream.serving.http.process import (
    INSTANCE_KEY_VARIABLE,
    ProcessSettings,
    keys_from_environment,
    run_app,
    secret_from_environment,
)
from slipstream.serving.router.ticket import TicketSigner


class InstanceSettings(ProcessSettings, kw_only=True):
    """One instance: its name, its bundle, where histories are; `model` is an `InstanceConfig`."""

    name: str
    bundle: str
    history: str
    shelf: str | None = None
    keep: int = KEEP
    ticket_seconds: float = 60.0
    max_body_bytes: int = 4 * 2**20
    deadline_ms: float = 1_000.0
    model: dict[str, Any] = msgspec.field(default_factory=dict)


def read_settings(argument: str) -> InstanceSettings:
    """Decode an instance's settings; `-` reads them from stdin, for a spare that waits for them."""
    text = sys.stdin.readline() if argument == "-" else argument
    if not text:
        sys.exit(0)  # the supervisor ended before the spare was needed
    return msgspec.json.decode(text, type=InstanceSettings)


class InstanceApp:
    """The shared routes, with the instance's backlog on every answer; closes it at the end."""

    def __init__(self, service: InstanceService, limits: Limits) -> None:
        self.service = service
        self._app = build("instance", service.handlers(), limits, RequestMetrics(self._stats))

    def _stats(self) -> dict[tuple[str, ...], float]:
        stats = self.service.instance.stats()
        return {(f"instance_{name}",): value for name, value in stats.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return

        async def send_with_backlog(message: Any) -> None:
            if message["type"] == "http.response.start":
                backlog = b"%d" % self.service.instance.backlog
                message["headers"].append((BACKLOG_HEADER.encode(), backlog))
            await send(message)

        await self._app(scope, receive, send_with_backlog)

    async def _live(self, receive: Receive, send: Send) -> None:
        """Answer ASGI's lifespan: start at once, close the service at the end."""
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        with contextlib.suppress(Exception):
            await self.service.close()
        await send({"type": "lifespan.shutdown.complete"})


def build_instance(service: InstanceService, keys: Keys, limits: Limits) -> Gate:
    """Build an instance's app, ready for uvicorn."""
    return Gate(InstanceApp(service, limits), keys, limits)


def serve_instance(settings: InstanceSettings, open_instance: OpenInstance) -> None:
    """Serve what `open_instance` opens until a signal ends the process."""
    store = open_history_store(settings.history, settings.keep)
    tickets = TicketSigner(secret_from_environment(), settings.ticket_seconds)
    service = InstanceService(settings.name, open_instance, store, tickets, settings.drain_seconds)
    limits = Limits(max_body_bytes=settings.max_body_bytes, deadline_ms=settings.deadline_ms)
    app = build_instance(service, Keys(keys_from_environment(INSTANCE_KEY_VARIABLE)), limits)

    def start_draining() -> None:
        service.draining = True

    run_app(app, settings, start_draining)
