"""The instance's app and process: `python -m slipstream.serving.http.instance_app SETTINGS` serves
one bundle with one engine.
"""

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from starlette.types import Receive, Scope, Send

from slipstream.history.history_store import KEEP, open_history_store
from slipstream.serving.http.endpoints import BACKLOG_HEADER
from slipstream.serving.http.http_app import Gate, RequestMetrics, build
from slipstream.serving.http.instance_service import InstanceService, OpenModel
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
    """One instance: its name among the others, its bundle, where histories are, and the scheduler's
    and cache's settings.
    """

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
    """An instance's settings from its first argument. A spare process gets `-` and waits for them
    on stdin, its imports done.
    """
    text = sys.stdin.readline() if argument == "-" else argument
    if not text:
        sys.exit(0)  # the supervisor ended before the spare was needed
    return msgspec.json.decode(text, type=InstanceSettings)


class InstanceApp:
    """The ASGI app: the shared routes, an instance's backlog on every answer, and its close at the
    end.
    """

    def __init__(self, service: InstanceService, limits: Limits) -> None:
        self.service = service
        self._app = build("instance", service.handlers(), limits, RequestMetrics(self._figures))

    def _figures(self) -> dict[tuple[str, ...], float]:
        return {(f"instance_{name}",): value for name, value in self.service.model.stats().items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return

        async def send_with_backlog(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"].append((BACKLOG_HEADER.encode(), b"%d" % self.service.backlog()))
            await send(message)

        await self._app(scope, receive, send_with_backlog)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        with contextlib.suppress(Exception):
            await self.service.close()
        await send({"type": "lifespan.shutdown.complete"})


def build_instance(service: InstanceService, keys: Keys, limits: Limits) -> Gate:
    """An instance's app, ready for uvicorn."""
    return Gate(InstanceApp(service, limits), keys, limits)


def serve_model(
    settings: InstanceSettings,
    open_model: OpenModel,
    actions: tuple[str, ...],
    behaviours: Callable[..., Any],
    known: Callable[[Any, np.ndarray], np.ndarray],
) -> None:
    """Serve whatever `open_model` opens; returns when told to stop."""
    store = open_history_store(settings.history, actions, settings.keep)
    office = TicketSigner(secret_from_environment(), settings.ticket_seconds)
    service = InstanceService(
        settings.name, open_model, store, office, behaviours, known, settings.drain_seconds
    )
    limits = Limits(max_body_bytes=settings.max_body_bytes, deadline_ms=settings.deadline_ms)
    app = build_instance(service, Keys(keys_from_environment(INSTANCE_KEY_VARIABLE)), limits)

    def start_draining() -> None:
        service.draining = True

    run_app(app, settings, start_draining)
