"""The versions that a process serves: opened, used, drained, replaced, closed.

A request uses the version of its user, and the instance it began with, also while another version
is opened. A new version is opened and warmed beside the old one (`prepare`), then takes over
(`switch`); until then nothing has changed, and afterwards the old one can come back. Touch this
when an instance starts, ends or is replaced in another way.
"""

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.errors import SlipstreamError
from slipstream.serving.http import messages as m
from slipstream.serving.http.explore_messages import KillRequest
from slipstream.serving.http.http_app import HttpProblem, RequestContext
from slipstream.serving.http.version_messages import (
    PrepareAnswer,
    PrepareRequest,
    VersionsAnswer,
)
from slipstream.serving.supervisor_socket import Versions
from slipstream.serving.versions import VersionRecord

if TYPE_CHECKING:  # a stand-in can be served without torch
    from slipstream.serving.instance.instance import Instance

# Opens the version in a directory, given an instance that is open already (None at start).
OpenInstance = Callable[[Path, "Instance | None"], "Instance"]
Stats = Callable[[], dict[str, float]]
FOLLOW_SECONDS = 0.2
KEEP_SECONDS = 2.0  # for copies to the host tier when the process ends
log = logging.getLogger("slipstream.serving")


def refuse_kill(allowed: bool) -> None:
    """Refuse to kill an instance unless the server was started for it."""
    if not allowed:
        raise HttpProblem(
            403,
            "forbidden",
            "this server kills no instance; start it with --allow-kill to see one recover",
        )


class InstanceLifecycle:
    """The versions being served, and the endpoints about their state."""

    def __init__(
        self,
        name: str,
        open_instance: OpenInstance,
        stats: Stats,
        drain_seconds: float,
        versions: Versions,
    ) -> None:
        self.name, self._open, self._versions = name, open_instance, versions
        self._stats, self._drain_seconds = stats, drain_seconds
        self.record = versions.read()
        self.instance = open_instance(versions.path(self.record.stable), None)
        self._instances = {self.instance.version: self.instance}
        self.draining = self.ending = False  # ending: the process, which cannot be undone
        self.allow_kill = False
        self.counts: Counter[str] = Counter(requests_stable=0, requests_candidate=0)
        self._changing = asyncio.Lock()
        self._uses: dict[Instance, int] = {}  # requests that use each open instance
        self._closing: set[asyncio.Task[None]] = set()
        if self.record.candidate is not None:
            self._open_candidate(self.record.candidate)

    def _open_candidate(self, version: str) -> None:
        """Open the candidate of the record; without it, the stable version serves its users."""
        try:
            opened = self._open(self._versions.path(version), self.instance)
            self._instances[opened.version] = opened
        except SlipstreamError as error:
            log.error("the candidate %s cannot be opened: %s", version[:16], error)

    @contextlib.asynccontextmanager
    async def use(
        self, user: str | None = None, version: str | None = None
    ) -> AsyncIterator["Instance"]:
        """Keep an instance open while a request uses it: a user's, a version's, or the stable."""
        wanted = self.record.version_of(user) if version is None else version
        instance = self._instances.get(wanted, self.instance)
        if version is None and user is not None:
            stable = instance is self.instance
            self.counts["requests_stable" if stable else "requests_candidate"] += 1
        self._uses[instance] = self._uses.get(instance, 0) + 1
        try:
            yield instance
        finally:
            self._uses[instance] -= 1
            if not self._uses[instance]:
                del self._uses[instance]

    @property
    def instances(self) -> list["Instance"]:
        """Every open instance, the stable one first."""
        return sorted(self._instances.values(), key=lambda each: each is not self.instance)

    async def status(self, _message: None, context: RequestContext) -> m.StatusAnswer:
        """Show the instance's state, for routers."""
        return m.StatusAnswer(
            self.name,
            self.instance.version,
            self.is_alive() and not self.draining,
            self.draining,
            sum(instance.backlog for instance in self.instances),
            self._stats(),
        )

    async def healthz(self, _message: None, context: RequestContext) -> m.HealthAnswer:
        """Say that the process is alive."""
        return m.HealthAnswer("ok")

    async def readyz(self, _message: None, context: RequestContext) -> m.HealthAnswer:
        """Say whether requests may be sent."""
        if self.draining:
            raise HttpProblem(503, "draining", "draining")
        if not self.is_alive():
            raise HttpProblem(503, "unavailable", "the compute thread does not move")
        return m.HealthAnswer("ok")

    def is_alive(self) -> bool:
        """Return whether every compute thread moves; where not, only a restart helps."""
        return all(instance.is_alive() for instance in self._instances.values())

    async def drain(self, request: m.DrainRequest, context: RequestContext) -> m.DrainAnswer:
        """Report to be not ready from now on, so that routers send nothing more."""
        if request.instance not in (None, self.name):
            raise HttpProblem(404, "not_found", f"this is instance '{self.name}'")
        self.draining = True
        log.info("%s drains: it finishes what it has and takes nothing new", self.name)
        return m.DrainAnswer(self.name)

    async def undrain(self, request: m.DrainRequest, context: RequestContext) -> m.UndrainAnswer:
        """Report to be ready again."""
        if request.instance not in (None, self.name):
            raise HttpProblem(404, "not_found", f"this is instance '{self.name}'")
        if self.ending:
            raise HttpProblem(409, "conflict", "the process is about to end; its successor serves")
        self.draining = False
        return m.UndrainAnswer(self.name)

    async def kill(self, request: KillRequest, context: RequestContext) -> None:
        """End this process as a crash would, where that is permitted."""
        refuse_kill(self.allow_kill)
        if request.instance not in (None, self.name):
            raise HttpProblem(404, "not_found", f"this is instance '{self.name}'")
        os.kill(os.getpid(), signal.SIGKILL)

    # ---- versions --------------------------------------------------------------------------------

    async def versions(self, _message: None, context: RequestContext) -> VersionsAnswer:
        """Show what is served."""
        return VersionsAnswer({self.name: self.record})

    async def prepare(self, request: PrepareRequest, context: RequestContext) -> PrepareAnswer:
        """Open and warm the version that the bundle's directory holds; nothing serves it yet."""
        async with self._changing:
            version = await asyncio.to_thread(self._versions.pin)
            if request.version not in (None, version):
                raise HttpProblem(
                    409, "conflict", f"the bundle holds version {version}, not {request.version}"
                )
            await self._make_open(version)
            return PrepareAnswer(version)

    async def switch(self, record: VersionRecord, context: RequestContext) -> m.ReloadAnswer:
        """Serve by another record; requests in flight end on the instance they have."""
        async with self._changing:
            for version in sorted(record.open_versions):
                await self._make_open(version)
            await asyncio.to_thread(self._versions.keep, record)
            before = self.record.stable
            self._apply(record)
            return m.ReloadAnswer({self.name: before}, {self.name: record.stable})

    @contextlib.asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Follow the supervisor's record, also where nobody told this instance of a change."""

        async def follow() -> None:
            while True:
                await asyncio.sleep(FOLLOW_SECONDS)
                record = self._versions.changed()
                if record is None or record.number <= self.record.number:
                    continue
                try:
                    async with self._changing:
                        for version in sorted(record.open_versions):
                            await self._make_open(version)
                        if record.number > self.record.number:
                            self._apply(record)
                except (SlipstreamError, HttpProblem, OSError) as error:
                    log.error("the versions of record %d are not served: %s", record.number, error)

        task = asyncio.create_task(follow())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _make_open(self, version: str) -> None:
        """Open and warm a pinned version, unless it is open."""
        if version in self._instances:
            return
        path = self._versions.path(version)
        opened = await asyncio.to_thread(self._open, path, self.instance)
        if opened.version != version:
            opened.discard()
            raise HttpProblem(
                409, "conflict", f"the bundle was replaced meanwhile: it holds {opened.version}"
            )
        self._instances[version] = opened
        log.info("%s: version %s is open and warm", self.name, version[:16])

    def _apply(self, record: VersionRecord) -> None:
        """Serve by a record whose versions are open; close the others when they are unused."""
        if record.stable != self.record.stable:
            log.info("%s serves version %s", self.name, record.stable[:16])
        self.record, self.instance = record, self._instances[record.stable]
        for version in set(self._instances) - record.open_versions:
            old = self._instances.pop(version)
            task = asyncio.create_task(self._close_when_unused(old, replaced=True))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Finish running requests, then close the instance."""
        self.draining = self.ending = True
        for instance in self.instances:
            await self._close_when_unused(instance)
        if self._closing:
            await asyncio.wait(self._closing, timeout=self._drain_seconds)

    async def _close_when_unused(self, instance: "Instance", *, replaced: bool = False) -> None:
        """Close a version; its host tier goes with one that was replaced, else it is kept."""
        end = time.monotonic() + self._drain_seconds
        while self._uses.get(instance) and time.monotonic() < end:
            await asyncio.sleep(0.01)
        await instance.drain(max(0.0, end - time.monotonic()))
        if replaced:
            instance.discard()
        else:
            await instance.keep_prefixes(min(KEEP_SECONDS, max(0.0, end - time.monotonic())))
            instance.close()
