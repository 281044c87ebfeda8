"""A router changes the versions that all instances serve: reload, canary, promote, roll back.

A change has two phases. First every instance opens and warms the new version beside the old one;
where one cannot, nothing has changed. Then all switch; where one fails at that, those that have
switched go back. So instances never stay on different versions because a reload failed midway.
Touch this when versions change in another way.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

import msgspec

from slipstream.serving.http import messages as m
from slipstream.serving.http.http_app import Handler, HttpProblem, RequestContext
from slipstream.serving.http.version_messages import (
    PrepareAnswer,
    PrepareRequest,
    RollbackRequest,
    TrafficRequest,
    VersionsAnswer,
)
from slipstream.serving.versions import VersionRecord

OPENING_AT_ONCE = 2  # instances that open a version at the same time: the others serve
BACK_SECONDS = 10.0  # for going back after a switch that failed

# Sends a message to the instance of a name: (name, path or GET path, body, deadline) -> body
Command = Callable[[str, str, bytes, float], Awaitable[bytes]]


class VersionEndpoints:
    """The endpoints of a router about versions."""

    def __init__(self, command: Command, names: Callable[[], list[str]]) -> None:
        self._command, self._names = command, names
        self._changing = asyncio.Lock()

    def handlers(self) -> dict[str, Handler]:
        """Return the endpoints by name."""
        return {
            "reload": self.reload,
            "traffic": self.traffic,
            "rollback": self.rollback,
            "versions": self.versions,
        }

    async def versions(self, _message: None, context: RequestContext) -> VersionsAnswer:
        """Show what every instance serves."""
        return VersionsAnswer(await self._records(context.deadline))

    async def reload(self, request: m.ReloadRequest, context: RequestContext) -> m.ReloadAnswer:
        """Serve the version that the bundle's directory holds now, to all or to a share."""
        async with self._changing:
            before = await self._records(context.deadline)
            present = _agreed(before)
            prepare = msgspec.json.encode(PrepareRequest(request.version))
            try:
                found = await self._all("/admin/prepare", prepare, context.deadline)
                answers = {
                    name: msgspec.json.decode(body, type=PrepareAnswer)
                    for name, body in found.items()
                }
                opened = {answer.version for answer in answers.values()}
                if len(opened) != 1:
                    raise HttpProblem(
                        409,
                        "conflict",
                        "the bundle was replaced while instances opened it; nothing was changed: "
                        "reload again",
                    )
            except HttpProblem:
                await self._go_back(before, present)
                raise
            version = opened.pop()
            after = present.with_version(version, request.share, request.shadow)
            return await self._switch(before, present, after, context.deadline)

    async def traffic(self, request: TrafficRequest, context: RequestContext) -> m.ReloadAnswer:
        """Change the candidate's shares; at a share of 1 it becomes the stable version."""
        async with self._changing:
            before = await self._records(context.deadline)
            present = _agreed(before)
            if present.candidate is None:
                raise HttpProblem(
                    409, "conflict", "there is no candidate; open one with a share: reload --share"
                )
            share = present.share if request.share is None else request.share
            shadow = present.shadow if request.shadow is None else request.shadow
            after = present.with_version(present.candidate, share, shadow)
            return await self._switch(before, present, after, context.deadline)

    async def rollback(self, request: RollbackRequest, context: RequestContext) -> m.ReloadAnswer:
        """Drop the candidate; where there is none, serve the version before."""
        async with self._changing:
            before = await self._records(context.deadline)
            present = _agreed(before)
            after = present.rolled_back()
            if after is None:
                raise HttpProblem(
                    409, "conflict", "there is no version to go back to since this server started"
                )
            return await self._switch(before, present, after, context.deadline)

    async def _switch(
        self,
        before: dict[str, VersionRecord],
        present: VersionRecord,
        after: VersionRecord,
        deadline: float,
    ) -> m.ReloadAnswer:
        """Let all instances serve by another record, or none."""
        total = m.ReloadAnswer({name: record.stable for name, record in before.items()}, {})
        try:
            await self._all("/admin/switch", msgspec.json.encode(after), deadline)
        except HttpProblem as problem:
            await self._go_back(before, msgspec.structs.replace(present, number=after.number))
            raise HttpProblem(
                problem.status,
                problem.code,
                f"{problem.detail}; all instances serve version {present.stable[:16]} again",
            ) from problem
        total.after = dict.fromkeys(before, after.stable)
        return total

    async def _go_back(self, before: dict[str, VersionRecord], present: VersionRecord) -> None:
        """Let every instance that answers serve as before, and close what was prepared."""
        end = time.monotonic() + BACK_SECONDS
        record = msgspec.json.encode(msgspec.structs.replace(present, number=present.number + 1))
        calls = (self._command(name, "/admin/switch", record, end) for name in before)
        await asyncio.gather(*calls, return_exceptions=True)

    async def _records(self, deadline: float) -> dict[str, VersionRecord]:
        found: dict[str, VersionRecord] = {}
        for body in (await self._all("GET /admin/versions", b"", deadline)).values():
            found |= msgspec.json.decode(body, type=VersionsAnswer).instances
        return found

    async def _all(self, path: str, body: bytes, deadline: float) -> dict[str, bytes]:
        """Send a message to every instance; the first refusal is raised when all have answered."""
        names, turn = self._names(), asyncio.Semaphore(OPENING_AT_ONCE)

        async def ask(name: str) -> bytes:
            async with turn:
                return await self._command(name, path, body, deadline)

        answers = await asyncio.gather(*map(ask, names), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return dict(zip(names, (a for a in answers if isinstance(a, bytes)), strict=True))


def _agreed(records: dict[str, VersionRecord]) -> VersionRecord:
    """Return the record that instances share; where they differ, the one most of them have."""
    if not records:
        raise HttpProblem(503, "unavailable", "no instance is known yet; try again soon")
    found = list(records.values())
    latest = max(record.number for record in found)
    common = max(found, key=lambda record: sum(record.stable == each.stable for each in found))
    return msgspec.structs.replace(common, number=latest)
