"""How a process of a deployment lives and ends: heartbeat, signals, and what its supervisor says.

SIGTERM, SIGINT or the supervisor's death start the end: the app is no longer ready, serves for
`linger` more seconds so that routers notice, then accepts no connection, finishes the requests it
has and ends. A second signal does not shorten this. The supervisor's word END_NOW, sent when no
router is left, leaves out the lingering. Touch this when processes end in another way.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable

import uvicorn

from slipstream.serving.heartbeat import Heartbeat

BEAT_SECONDS = 0.2
END_NOW = b"end\n"  # on stdin: end without lingering


class ProcessLife:
    """Watches over one uvicorn server until it has ended."""

    def __init__(
        self,
        server: uvicorn.Server,
        start_draining: Callable[[], None],
        *,
        linger: float,
        heartbeat: str | None,
        watch_parent: bool,
        is_alive: Callable[[], bool] = lambda: True,
    ) -> None:
        self._server, self._start_draining, self._is_alive = server, start_draining, is_alive
        self._linger, self._watch_parent = linger, watch_parent
        self._heartbeat = Heartbeat(heartbeat) if heartbeat is not None else None
        self._ending: asyncio.Task[None] | None = None
        self._end_now = asyncio.Event()

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Listen to signals and to the supervisor, and beat, while the block serves."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._begin_end)
        if self._watch_parent:
            loop.add_reader(sys.stdin.fileno(), self._read_stdin, loop)
        beating = asyncio.create_task(self._beat_forever())
        try:
            yield
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)

    async def _beat_forever(self) -> None:
        while not self._server.started:
            await asyncio.sleep(0.01)
        while self._heartbeat is not None and self._ending is None:
            if self._is_alive():
                self._heartbeat.beat()
            await asyncio.sleep(BEAT_SECONDS)

    def _read_stdin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin the end: the supervisor asks for it, or is gone."""
        word = os.read(sys.stdin.fileno(), 4096)
        if not word:
            loop.remove_reader(sys.stdin.fileno())
        if word.endswith(END_NOW):
            self._end_now.set()
        self._begin_end()

    def _begin_end(self) -> None:
        if self._ending is None:
            if self._heartbeat is not None:
                self._heartbeat.end()
            self._ending = asyncio.create_task(self._end())

    async def _end(self) -> None:
        self._start_draining()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._end_now.wait(), self._linger)
        self._server.should_exit = True
