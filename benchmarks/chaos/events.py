"""Events of the chaos benchmark beside kills: reloads, jumps of the clock, a full disk, no store.

Each is done once by calling it with the verdict, under load. Touch this when an event is done in
another way.
"""

import asyncio
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos.course import Verdict, wait_for
from benchmarks.chaos.jumping_clock import set_offset
from benchmarks.chaos.load import Visitor
from benchmarks.chaos.outages import RedisProcess, full_disk
from slipstream.bundle import WEIGHTS
from slipstream.errors import SlipstreamError
from slipstream.serving.http.client import AsyncClient, RefusalError, UnreachableError

JUMPS = (7_200.0, -3_600.0, 0.0)  # seconds from the machine's clock: ahead, back, and right again
CLOCK_SECONDS = 60.0  # how far a clock may be from where it jumped to
OUTAGE_SECONDS = 3.0
APPENDS, APPENDED = 400, 1_000  # until a full disk has no room left in the file


@dataclass(frozen=True)
class Stage:
    """Where events happen: a deployment's address and operator key, its files, its versions."""

    url: str
    admin_key: str
    bundle: Path
    versions: tuple[Path, Path]  # bundles that take turns in the bundle's place
    disk: Path
    clock: Path
    log: Callable[[str], None]

    def client(self, deadline_ms: float = 60_000.0) -> AsyncClient:
        """Return a client that may do everything."""
        return AsyncClient(self.url, self.admin_key, deadline_ms)


def put_in_place(source: Path, bundle: Path) -> None:
    """Put a copy of a bundle in the place of another one, as an export does."""
    beside, old = bundle.with_name("beside"), bundle.with_name("old")
    shutil.copytree(source, beside)
    if bundle.exists():
        bundle.rename(old)
    beside.rename(bundle)
    shutil.rmtree(old, ignore_errors=True)


class Reload:
    """The other version takes over; the first time a damaged one is tried before.

    Later the server has a whole copy of each version, and would open that.
    """

    def __init__(self, stage: Stage, number: int) -> None:
        self._stage, self._number = stage, number

    async def __call__(self, verdict: Verdict) -> None:
        """Reload under load; nothing may fail."""
        stage = self._stage
        wanted = stage.versions[(self._number + 1) % 2]
        with verdict.losing_nothing("reload"):
            async with stage.client() as admin:
                if self._number == 0:
                    await self._damaged(admin, wanted)
                await asyncio.to_thread(put_in_place, wanted, stage.bundle)
                began = time.monotonic()
                answer = await admin.reload()
            seconds = time.monotonic() - began
        if answer.before == answer.after:
            raise SlipstreamError("a reload changed no version; does the load store bundles?")
        verdict.recovered("reload", seconds)
        stage.log(f"reloaded in {seconds:.2f} s")

    async def _damaged(self, admin: AsyncClient, wanted: Path) -> None:
        damaged = self._stage.bundle.with_name("damaged")
        shutil.copytree(wanted, damaged)
        with (damaged / WEIGHTS).open("r+b") as file:
            file.seek(-8, 2)
            byte = file.read(1)
            file.seek(-8, 2)
            file.write(bytes([byte[0] ^ 1]))
        await asyncio.to_thread(put_in_place, damaged, self._stage.bundle)
        shutil.rmtree(damaged)
        try:
            await admin.reload()
        except RefusalError as refused:
            self._stage.log(f"a damaged bundle was refused: {refused.detail}")
        else:
            raise SlipstreamError("a bundle with a changed byte was served")


class ClockJump:
    """The wall clock of all serving processes jumps."""

    def __init__(self, stage: Stage, number: int) -> None:
        self._stage, self._user = stage, f"clock {number}"
        self._offset = JUMPS[number % len(JUMPS)]

    async def __call__(self, verdict: Verdict) -> None:
        """Set the clock under load; nothing may fail."""
        with verdict.losing_nothing("clock"):
            before = len(verdict.tally.successes)
            set_offset(self._stage.clock, self._offset)
            seconds = await wait_for(
                lambda: len(verdict.tally.successes) > before + 10, "no request was answered"
            )
            await asyncio.sleep(1.0)
            await self._check_clock()
        verdict.recovered("clock", seconds)
        self._stage.log(f"the clock jumped to {self._offset:+,.0f} s")

    async def _check_clock(self) -> None:
        """Refuse a jump that did not reach the processes: an append of now says what time it is."""
        async with self._stage.client() as client:
            await client.events(self._user, [1])
            (told,) = (await client.user(self._user)).recent.timestamps or [0]
        if abs(told - time.time() - self._offset) > CLOCK_SECONDS:
            raise SlipstreamError("the clock of the instances did not jump; do they read another?")


class FullDisk:
    """The file system of the history store has no room left, then has it again."""

    def __init__(self, stage: Stage, number: int) -> None:
        self._stage, self._user = stage, f"filler {number}"

    async def __call__(self, verdict: Verdict) -> None:
        """Fill the disk until appends are refused, then empty it."""
        begin = time.monotonic()
        async with self._stage.client(5_000.0) as client:
            with full_disk(self._stage.disk):
                for _ in range(APPENDS):
                    if not await self._append(client, APPENDED):
                        break
                else:
                    raise SlipstreamError("a full disk refused no append; is it a small one?")
                await asyncio.sleep(1.0)
            room = time.monotonic()
            while not await self._append(client, 1):
                if time.monotonic() - room > 60.0:
                    raise SlipstreamError("appends are still refused though the disk has room")
                await asyncio.sleep(0.05)
        verdict.recovered("disk", time.monotonic() - room, begin, "append")
        self._stage.log(
            f"after a full disk, appends were stored {time.monotonic() - room:.2f} s on"
        )

    async def _append(self, client: AsyncClient, count: int) -> bool:
        try:
            await client.events(self._user, [1] * count, [1_600_000_000] * count)
        except RefusalError as refused:
            if refused.status != 503:
                raise
            return False
        return True


class StoreOutage:
    """Redis is killed, stays away for a while and comes back over the same file."""

    def __init__(self, stage: Stage, redis: RedisProcess, visitors: Sequence[Visitor]) -> None:
        """`visitors` are stored ones: the store is back when each of them was ranked."""
        self._stage, self._redis, self._visitors = stage, redis, visitors

    async def __call__(self, verdict: Verdict) -> None:
        """Kill the store and start it again; only what needs it may fail."""
        begin = time.monotonic()
        self._redis.kill()
        await asyncio.sleep(OUTAGE_SECONDS)
        await asyncio.to_thread(self._redis.start)
        back = time.monotonic()
        async with self._stage.client(2_000.0) as client:
            for visitor in self._visitors:
                while not await _ranked(client, visitor, verdict):
                    if time.monotonic() - back > 60.0:
                        raise SlipstreamError("stored users are not ranked, yet the store is back")
                    await asyncio.sleep(0.05)
        verdict.recovered("store", time.monotonic() - back, begin, "store")
        self._stage.log(
            f"after Redis was back, all users were ranked {time.monotonic() - back:.2f} s on"
        )


async def _ranked(client: AsyncClient, visitor: Visitor, verdict: Verdict) -> bool:
    try:
        answer = await client.rank(visitor.user, visitor.candidates)
    except (RefusalError, UnreachableError):
        return False
    verdict.tally.check(visitor, answer)
    return True
