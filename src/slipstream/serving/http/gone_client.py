"""Whether the client of a request is still there; where it has gone, its work is cancelled.

A request that is answered at once never looks. Touch this when a client's absence should be noticed
in another way.
"""

import asyncio
from types import TracebackType

from starlette.types import Receive

LOOK_AFTER_SECONDS = 0.01
GONE_STATUS = 499  # in metrics and logs; nobody is there to read it


class ClientGoneError(Exception):
    """The client closed its connection before the answer."""


class GoneClient:
    """Cancels the block when the client goes; it then ends with `ClientGoneError`.

    Use it when the whole body has been read: from then on, the only message is the disconnect.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive, self._gone = receive, False
        self._looking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "GoneClient":
        self._task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(LOOK_AFTER_SECONDS, self._look)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        if self._looking is not None:
            self._looking.cancel()
        if self._gone and self._task is not None:
            self._task.uncancel()
            if kind is asyncio.CancelledError:
                raise ClientGoneError from error

    def _look(self) -> None:
        self._looking = asyncio.ensure_future(self._wait())

    async def _wait(self) -> None:
        message = await self._receive()
        if message["type"] != "http.disconnect":
            return  # a server that repeats the body says nothing of its client
        self._gone = True
        if self._task is not None:
            self._task.cancel()
