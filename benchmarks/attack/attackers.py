"""The attackers: a process that holds, slows and floods connections to a server on loopback.

`python -m benchmarks.attack.attackers` reads its plan from stdin, because keys never stand in a
command line, and writes its report to stdout. `start_attackers` runs it. Touch this when another
attack is tried.
"""

import asyncio
import contextlib
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Literal

import msgspec

AttackKind = Literal["connections", "slow_head", "slow_body", "junk", "header", "no_key"]
CONNECTING = 256  # connections begun at once
LIMITS: dict[AttackKind, float] = {  # seconds by which the server ends an attempt, and 5 more
    "connections": 15.0,
    "slow_head": 15.0,
    "slow_body": 20.0,
    "junk": 5.0,
    "header": 10.0,
    "no_key": 5.0,
}
END_SECONDS = 30.0


class Attack(msgspec.Struct, frozen=True):
    """Attempts of one kind from one address; a rate of 0 begins them all at once."""

    kind: AttackKind
    source: str
    count: int = 1_000_000
    per_second: float = 0.0
    pause: float = 0.5  # between two bytes of a slow request
    header_bytes: int = 4 * 2**20


class AttackPlan(msgspec.Struct, frozen=True):
    """What the process does: until every attempt was ended, at most so many seconds."""

    port: int
    seconds: float
    attacks: list[Attack]
    key: str = ""


class AttackTally(msgspec.Struct):
    """How the attempts of one kind ended: by status, `closed` without one, or not at all."""

    refused: int = 0
    served: int = 0  # answered with a status below 400
    endured: int = 0  # open for longer than the limit of their kind
    unfinished: int = 0  # open, but not for long: not counted
    unsent: int = 0  # no connection was made: not counted
    endings: dict[str, int] = {}

    @property
    def attempts(self) -> int:
        """Return how many attempts count."""
        return self.refused + self.served + self.endured


class AttackReport(msgspec.Struct):
    """What the attackers saw, and what they cost."""

    tallies: dict[AttackKind, AttackTally]
    processor_seconds: float


class Attackers:
    """Runs a plan in this process."""

    def __init__(self, plan: AttackPlan) -> None:
        self._plan = plan
        self._tallies = {attack.kind: AttackTally() for attack in plan.attacks}
        self._kept: list[asyncio.StreamWriter] = []  # the attackers' side stays open
        self._connecting = asyncio.Semaphore(CONNECTING)
        self._end = 0.0

    async def run(self) -> AttackReport:
        """Begin the attempts, wait until the plan's time is over or all of them have ended."""
        self._end = time.monotonic() + self._plan.seconds
        await asyncio.gather(*(self._attack(attack) for attack in self._plan.attacks))
        used = resource.getrusage(resource.RUSAGE_SELF)
        return AttackReport(self._tallies, used.ru_utime + used.ru_stime)

    async def _attack(self, attack: Attack) -> None:
        begun: set[asyncio.Task[None]] = set()
        start = time.monotonic()
        for number in range(attack.count):
            if attack.per_second:
                due = start + number / attack.per_second
                if due >= self._end:
                    break
                await asyncio.sleep(max(0.0, due - time.monotonic()))
            begun.add(asyncio.create_task(self._attempt(attack)))
        await asyncio.gather(*begun)

    async def _attempt(self, attack: Attack) -> None:
        tally, began = self._tallies[attack.kind], time.monotonic()
        try:
            async with self._connecting, asyncio.timeout_at(self._loop_end()):
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1", self._plan.port, local_addr=(attack.source, 0), limit=65_536
                )
        except (OSError, TimeoutError):
            tally.unsent += 1
            return
        self._kept.append(writer)
        began = time.monotonic()
        sending = asyncio.create_task(self._send(attack, writer))
        try:
            async with asyncio.timeout_at(self._loop_end()):
                self._count(attack.kind, await _first_line(reader))
        except TimeoutError:
            if time.monotonic() - began > LIMITS[attack.kind]:
                tally.endured += 1
            else:
                tally.unfinished += 1
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    def _loop_end(self) -> float:
        return asyncio.get_running_loop().time() + self._end - time.monotonic()

    def _count(self, kind: AttackKind, line: bytes) -> None:
        tally, words = self._tallies[kind], line.split()
        status = int(words[1]) if len(words) > 1 and words[1].isdigit() else None
        ending = "closed" if status is None else str(status)
        tally.endings[ending] = tally.endings.get(ending, 0) + 1
        if status is not None and status < 400:
            tally.served += 1
        else:
            tally.refused += 1

    async def _send(self, attack: Attack, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            for part in _parts(attack, self._plan.key):
                writer.write(part)
                await writer.drain()
                if attack.kind in ("slow_head", "slow_body"):
                    await asyncio.sleep(attack.pause)


def _parts(attack: Attack, key: str) -> Iterator[bytes]:
    """Return what an attempt sends, piece by piece."""
    if attack.kind == "connections":
        return
    head = b"POST /v1/rank HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    if attack.kind == "slow_head":
        for byte in head * 100:
            yield bytes([byte])
    elif attack.kind == "slow_body":
        yield head + f"x-api-key: {key}\r\ncontent-length: 1000\r\n\r\n".encode()
        for _ in range(1_000):
            yield b" "
    elif attack.kind == "header":
        yield head + b"x-long: "
        for _ in range(attack.header_bytes // 65_536):
            yield b"x" * 65_536
        yield b"\r\n\r\n"
    elif attack.kind == "no_key":
        yield head + b"x-api-key: somebody else's key\r\ncontent-length: 2\r\n\r\n{}"
    else:
        yield b"\x00" + os.urandom(511)


async def _first_line(reader: asyncio.StreamReader) -> bytes:
    """Read until the server ends the connection; return the first line it sent."""
    line = b""
    with contextlib.suppress(ConnectionError, ValueError, asyncio.LimitOverrunError):
        line = await reader.readline()
        if line.split()[1:2] >= [b"400"]:
            return line
        while await reader.read(65_536):
            pass
    return line


class RunningAttackers:
    """The process of the attackers."""

    def __init__(self, plan: AttackPlan) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.attack.attackers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self._seconds = plan.seconds
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(plan))
        self._process.stdin.close()
        self._process.stdin = None

    @property
    def running(self) -> bool:
        """Whether the attack goes on."""
        return self._process.poll() is None

    def report(self) -> AttackReport:
        """Wait for the end of the attack and return what it saw."""
        output, _ = self._process.communicate(timeout=self._seconds + END_SECONDS)
        return msgspec.json.decode(output, type=AttackReport)

    def end(self) -> None:
        """End the process if it still runs."""
        if self.running:
            self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


@contextlib.contextmanager
def start_attackers(plan: AttackPlan) -> Iterator[RunningAttackers]:
    """Attack until the plan's end; the process has ended when the block ends."""
    running = RunningAttackers(plan)
    try:
        yield running
    finally:
        running.end()


def main() -> None:
    """Read a plan, carry it out, write the report."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=AttackPlan)

    async def attack() -> AttackReport:
        return await Attackers(plan).run()

    sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(attack())))


if __name__ == "__main__":
    main()
