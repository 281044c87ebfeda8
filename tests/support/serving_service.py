"""An instance service around the stand-in, in this process."""

import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from slipstream.history.history_store import open_history_store
from slipstream.serving.http.http_app import RequestContext
from slipstream.serving.http.instance_service import InstanceService
from slipstream.serving.router.ticket import TicketSigner
from tests.support.serving_stand_in import StandInInstance

SECRET = b"a secret of sixteen bytes or more"


@contextlib.asynccontextmanager
async def opened_service(tmp_path: Path, **settings: Any) -> AsyncIterator[InstanceService]:
    """A service with a SQLite store; `tmp_path / "version"` is its bundle's version."""
    (tmp_path / "version").write_text("v1")
    store = open_history_store(f"sqlite:{tmp_path / 'history.db'}")

    def open_instance(current: Any) -> Any:
        version = (tmp_path / "version").read_text()
        same = current is not None and current.version == version
        return current if same else StandInInstance(tmp_path, **settings)

    service = InstanceService("i-0", open_instance, store, TicketSigner(SECRET), 1.0)
    try:
        yield service
    finally:
        await service.close()


def context(seconds: float = 20.0, **path: str) -> RequestContext:
    """What a handler gets with a message."""
    return RequestContext(time.monotonic() + seconds, path, {})
