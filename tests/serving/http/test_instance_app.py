"""The app of an instance: its backlog on every answer, and an orderly end."""

import asyncio
from pathlib import Path
from typing import Any

from slipstream.serving.http.instance_app import InstanceApp
from slipstream.serving.http.limits import Limits
from tests.support.asgi import ask
from tests.support.serving_service import opened_service


def test_every_answer_carries_the_backlog_and_metrics_show_the_instance(tmp_path: Path):
    async def scenario() -> None:
        async with opened_service(tmp_path) as service:
            app = InstanceApp(service, Limits())
            service.life.instance.backlog = 77
            for path in ("/healthz", "/v1/status", "/nowhere"):
                assert (await ask(app, "GET", path)).headers["x-slipstream-backlog"] == "77"
            assert "slipstream_instance_kept 0.0" in (await ask(app, "GET", "/metrics")).content

    asyncio.run(scenario())


def test_the_end_of_the_lifespan_closes_the_service(tmp_path: Path):
    async def scenario() -> list[str]:
        async with opened_service(tmp_path) as service:
            sent: list[str] = []
            messages = iter(["lifespan.startup", "lifespan.shutdown"])

            async def receive() -> dict[str, Any]:
                return {"type": next(messages)}

            async def send(message: Any) -> None:
                sent.append(message["type"])

            store = service.users.store.close
            closed = []

            async def close_once() -> None:
                if not closed:
                    closed.append(True)
                    await store()

            service.users.store.close = close_once  # the fixture closes it, too
            await InstanceApp(service, Limits())({"type": "lifespan"}, receive, send)
            assert service.life.draining and service.life.instance.closed and closed
            return sent

    sent = asyncio.run(scenario())
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
