"""The page as a process of its own: its files, runs and traces, and the models it asks.

It listens on this machine only: it has no key of its own, and it reads the runs of the user who
started it. Touch this when the page's process starts or ends in another way.
"""

from pathlib import Path
from urllib.parse import quote

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from slipstream.serving.http import explore_messages as em
from slipstream.serving.http.api_keys import Keys
from slipstream.serving.http.gate import Gate
from slipstream.serving.http.http_app import RequestMetrics, build
from slipstream.serving.http.limits import Limits
from slipstream.serving.http.page_files import PageFiles
from slipstream.serving.http.process import ProcessSettings, run_app
from slipstream.ui import page_directory
from slipstream.ui.model_proxy import PREFIX, ModelProxy
from slipstream.ui.page_endpoints import PAGE_ENDPOINTS, PageEndpoints
from slipstream.ui.run_records import RunRecords


class PageSettings(ProcessSettings, kw_only=True):
    """Where the page listens, the models it asks (name → address), the directory of runs."""

    models: dict[str, str] = msgspec.field(default_factory=dict)
    runs: str | None = None


class PageApp:
    """The ASGI app: own endpoints first, then the models."""

    def __init__(self, settings: PageSettings) -> None:
        models = [
            em.PageModel(name, PREFIX + quote(name, safe="") if place else "")
            for place, name in enumerate(settings.models)
        ]
        records = None if settings.runs is None else RunRecords(Path(settings.runs))
        page = em.PageAnswer(models, records is not None, simulation=True)
        endpoints = PageEndpoints(page, records)
        self.metrics = RequestMetrics(dict)
        self._own: ASGIApp = build(
            "page", endpoints.handlers(), Limits(), self.metrics, PAGE_ENDPOINTS
        )
        self._paths = {endpoint.path for endpoint in PAGE_ENDPOINTS}
        self._models = ModelProxy(
            {quote(name, safe=""): url.rstrip("/") for name, url in settings.models.items()}
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["path"] in self._paths:
            await self._own(scope, receive, send)
        else:
            await self._models(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._models.close()
        await send({"type": "lifespan.shutdown.complete"})


def build_page(settings: PageSettings) -> ASGIApp:
    """Build the app of the page's process."""
    app = PageApp(settings)
    return PageFiles(page_directory(), Gate(app, Keys(), Limits(), app.metrics))


def serve_page(settings: PageSettings) -> None:
    """Serve the page until SIGTERM or SIGINT."""
    run_app(build_page(settings), settings, lambda: None)
