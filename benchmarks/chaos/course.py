"""The course of the chaos benchmark: a deployment under load is killed, drained and watched.

Touch this when another failure should be tried.
"""

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.chaos.load import Disturbance, Load, Need, Tally
from benchmarks.process_figures import resident_bytes
from slipstream.errors import SlipstreamError
from slipstream.serving.http.readiness import is_ready
from slipstream.serving.supervisor import Child, DeploymentConfig, Supervisor

RECOVERY_LIMIT_SECONDS = 60.0


@dataclass
class Verdict:
    """What the course found."""

    tally: Tally
    disturbances: list[Disturbance] = field(default_factory=list)
    recoveries: dict[str, list[float]] = field(default_factory=dict)
    lost_in_rolling: int = 0
    lost_at_end: int = 0
    lost: dict[str, int] = field(default_factory=dict)  # where nothing may fail: reload, clock
    resident_bytes: list[dict[str, int]] = field(default_factory=list)

    def recovered(
        self, event: str, seconds: float, begin: float | None = None, breaks: Need = "nothing"
    ) -> None:
        """Note how long a recovery took; with `begin`, something was broken from then to now."""
        self.recoveries.setdefault(event, []).append(seconds)
        if begin is not None:
            self.disturbances.append(Disturbance(begin, time.monotonic(), breaks))

    @contextlib.contextmanager
    def losing_nothing(self, event: str) -> Iterator[None]:
        """Count the requests that fail in the block and that nothing before explains."""
        first = len(self.tally.failures)
        yield
        lost = len(self.tally.unexplained(self.disturbances, first))
        self.lost[event] = self.lost.get(event, 0) + lost

    def growth(self) -> float:
        """Divide resident memory at the end of the soak by that at its beginning (medians)."""
        totals = [sum(sample.values()) for sample in self.resident_bytes]
        third = max(1, len(totals) // 3)
        first, last = sorted(totals[:third]), sorted(totals[-third:])
        return last[len(last) // 2] / first[len(first) // 2]


@dataclass(frozen=True)
class Course:
    """How long the course takes, and how often it kills."""

    instance_kills: int = 3
    router_kills: int = 2
    between_kills: float = 3.0
    rolling: int = 1
    soak_seconds: float = 0.0
    sample_seconds: float = 1.0
    hangs: int = 0
    reloads: int = 0
    clock_jumps: int = 0
    full_disks: int = 0
    store_kills: int = 0  # of a deployment of its own


Event = Callable[[Verdict], Awaitable[None]]


@contextlib.contextmanager
def supervised(plan: DeploymentConfig, log: Callable[[str], None]) -> Iterator[Supervisor]:
    """Run a supervisor in a thread; all its processes have ended when the block ends."""
    supervisor = Supervisor(plan, log)
    failure: list[BaseException] = []

    def run() -> None:
        try:
            supervisor.run()
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        while thread.is_alive() and not supervisor.all_ready:
            time.sleep(0.05)
        if failure:
            raise failure[0]
        yield supervisor
    finally:
        supervisor.stop()
        thread.join()


def run_course(
    supervisor: Supervisor,
    load: Load,
    course: Course,
    log: Callable[[str], None],
    events: Sequence[Event] = (),
    verdict: Verdict | None = None,
) -> Verdict:
    """Run the whole course, `events` after the kills; the supervisor is stopped at its end."""
    verdict = verdict or Verdict(load.tally)
    asyncio.run(_run_course(supervisor, load, course, log, events, verdict))
    return verdict


async def _run_course(
    supervisor: Supervisor,
    load: Load,
    course: Course,
    log: Callable[[str], None],
    events: Sequence[Event],
    verdict: Verdict,
) -> None:
    await load.store_histories()
    running = asyncio.create_task(load.run())
    try:
        await asyncio.sleep(1.0)
        instances, routers = supervisor.instances, supervisor.routers
        for number in range(course.instance_kills):
            await _kill(instances[number % len(instances)], "instance", verdict, log)
            await asyncio.sleep(course.between_kills)
        for number in range(course.router_kills):
            await _kill(routers[number % len(routers)], "router", verdict, log)
            await asyncio.sleep(course.between_kills)
        for number in range(course.hangs):
            await _hang(instances[number % len(instances)], verdict, log)
            await asyncio.sleep(course.between_kills)
        for event in events:
            await event(verdict)
            await asyncio.sleep(course.between_kills)
        before = len(load.tally.failures)
        for number in range(course.rolling):
            await _roll(supervisor.instances[number % len(supervisor.instances)], log)
        verdict.lost_in_rolling += len(load.tally.failures) - before
        await _soak(supervisor, course, verdict, log)
        before = len(load.tally.failures)
        load.stop()
        supervisor.stop()  # SIGTERM to all, with requests under way
        await running
        verdict.lost_at_end += len(load.tally.failures) - before
    finally:
        load.stop()
        supervisor.stop()
        await asyncio.gather(running, return_exceptions=True)


async def _kill(child: Child, kind: str, verdict: Verdict, log: Callable[[str], None]) -> None:
    """Send SIGKILL, then wait until the process answers again."""
    assert child.process is not None
    old, successes = child.process.pid, verdict.tally.successes
    begin = time.monotonic()
    os.kill(old, signal.SIGKILL)

    def gone() -> bool:  # until its memory is freed, its sockets are open
        return child.process is None or child.process.pid != old

    def back() -> bool:
        renewed = child.process is not None and child.process.pid != old
        if kind == "router":
            return renewed and bool(successes) and successes[-1] > child.started_at
        return renewed and is_ready(child.url)

    await wait_for(gone, f"{child.name} did not end")
    verdict.disturbances.append(Disturbance(begin, time.monotonic()))
    await wait_for(back, f"{child.name} did not come back")
    seconds = time.monotonic() - begin
    verdict.recovered(kind, seconds)
    log(f"killed {child.name}: back after {seconds:.2f} s")


async def _hang(child: Child, verdict: Verdict, log: Callable[[str], None]) -> None:
    """Send SIGSTOP, and never SIGCONT: the supervisor replaces what hangs."""
    assert child.process is not None
    begin, old = time.monotonic(), child.process.pid
    os.kill(old, signal.SIGSTOP)

    def back() -> bool:
        return child.process is not None and child.process.pid != old and is_ready(child.url)

    seconds = await wait_for(back, f"{child.name} hung and was not replaced")
    verdict.recovered("hang", seconds, begin)
    log(f"stopped {child.name}: replaced after {seconds:.2f} s")


async def _roll(child: Child, log: Callable[[str], None]) -> None:
    """Send SIGTERM to one instance under load: it drains, ends, and is started again."""
    assert child.process is not None
    old = child.process.pid
    os.kill(old, signal.SIGTERM)

    def back() -> bool:
        return child.process is not None and child.process.pid != old and is_ready(child.url)

    seconds = await wait_for(back, f"{child.name} did not come back from its drain")
    log(f"drained {child.name}: back after {seconds:.2f} s")


async def wait_for(condition: Callable[[], bool], problem: str) -> float:
    """Wait until a condition holds; return the seconds it took."""
    began = time.monotonic()
    while not await asyncio.to_thread(condition):
        if time.monotonic() - began > RECOVERY_LIMIT_SECONDS:
            raise SlipstreamError(f"{problem} within {RECOVERY_LIMIT_SECONDS:.0f} s")
        await asyncio.sleep(0.02)
    return time.monotonic() - began


async def _soak(
    supervisor: Supervisor, course: Course, verdict: Verdict, log: Callable[[str], None]
) -> None:
    """Leave everything alone and watch its memory."""
    end = time.monotonic() + course.soak_seconds
    last_log = time.monotonic()
    while time.monotonic() < end:
        verdict.resident_bytes.append(
            {
                child.name: 0 if child.process is None else resident_bytes(child.process.pid)
                for child in [*supervisor.instances, *supervisor.routers]
            }
        )
        if time.monotonic() - last_log > 30:
            last_log = time.monotonic()
            log(
                f"soaking: {sum(verdict.resident_bytes[-1].values()) / 2**20:.0f} MiB, "
                f"{end - last_log:.0f} s left"
            )
        await asyncio.sleep(course.sample_seconds)
