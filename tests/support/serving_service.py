"""An instance service around the stand-in, in this process."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from slipstream.history.history_store import open_history_store
from slipstream.serving.http import messages as m
from slipstream.serving.http.http_app import RequestContext
from slipstream.serving.http.instance_service import InstanceService
from slipstream.serving.router.ticket import TicketSigner
from slipstream.serving.supervisor_socket import UnpinnedVersions
from tests.support.serving_stand_in import (
    StandInInstance,
    read_standin_version,
    write_standin_bundle,
)

SECRET = b"a secret of sixteen bytes or more"


@contextlib.asynccontextmanager
async def opened_service(tmp_path: Path, **settings: Any) -> AsyncIterator[InstanceService]:
    """A service with a SQLite store; `tmp_path / "bundle"` is its bundle."""
    bundle = tmp_path / "bundle"
    write_standin_bundle(bundle, "v1")
    store = open_history_store(f"sqlite:{tmp_path / 'history.db'}")

    def open_instance(directory: Path, _current: Any) -> Any:
        return StandInInstance(directory, **settings)

    versions = UnpinnedVersions(lambda: read_standin_version(bundle), bundle)
    service = InstanceService("i-0", open_instance, store, TicketSigner(SECRET), versions, 1.0)
    try:
        yield service
    finally:
        await service.close()


def context(seconds: float = 20.0, **path: str) -> RequestContext:
    """What a handler gets with a message."""
    return RequestContext(time.monotonic() + seconds, path, {})


def with_service(
    tmp_path: Path, work: Callable[[InstanceService], Awaitable[None]], **settings: Any
) -> None:
    """Run a coroutine on an opened service, at most a minute."""

    async def whole() -> None:
        async with opened_service(tmp_path, **settings) as service:
            await work(service)

    asyncio.run(asyncio.wait_for(whole(), 60))


async def append(service: InstanceService, user: str, items: list[int], times: list[int]) -> int:
    """Append behaviours of a user; return how many are stored."""
    request = m.EventsRequest(user, items, times)
    return (await service.users.events(request, context())).behaviours
