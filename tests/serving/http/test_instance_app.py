"""The app of an instance: its backlog on every answer, an orderly end, settings of a process."""

import asyncio
import io
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slipstream.serving.http.instance_app import InstanceApp, InstanceSettings, read_settings
from slipstream.serving.http.limits import Limits
from tests.support.asgi import ask
from tests.support.serving_service import opened_service


def test_every_answer_carries_the_backlog_and_metrics_show_the_instance(tmp_path: Path):
    async def scenario() -> None:
        async with opened_service(tmp_path) as service:
            app = InstanceApp(service, Limits())
            service.instance.backlog = 77
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

            store = service.store.close
            closed = []

            async def close_once() -> None:
                if not closed:
                    closed.append(True)
                    await store()

            service.store.close = close_once  # the fixture closes it, too
            await InstanceApp(service, Limits())({"type": "lifespan"}, receive, send)
            assert service.draining and service.instance.closed and closed
            return sent

    sent = asyncio.run(scenario())
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


def test_settings_come_from_the_argument_or_for_a_spare_from_stdin(monkeypatch):
    settings = InstanceSettings(name="i-0", bundle="b", history="sqlite:h", model={"max_batch": 2})
    text = msgspec.json.encode(settings).decode()
    assert read_settings(text) == settings
    monkeypatch.setattr("sys.stdin", io.StringIO(text + "\n"))
    assert read_settings("-") == settings
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(SystemExit) as ended:
        read_settings("-")
    assert ended.value.code == 0
