"""When the whole machine stood still: what no counter of stolen time tells.

A process of the highest priority sleeps 5 ms over and over and looks at the clock. Nothing in this
machine may keep it waiting, so where it wakes late, the processors themselves did not run: a
hypervisor paused them. Touch this when pauses are told apart in another way.
"""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

SLEEP = 0.005
NOTED = 0.01  # shorter pauses are not worth a line
_WITNESS = f"""
import os, time
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))
print("watching", flush=True)
before = time.monotonic()
while os.getppid() == {{parent}}:
    time.sleep({SLEEP})
    now = time.monotonic()
    if now - before > {SLEEP + NOTED}:
        print(now, now - before - {SLEEP}, flush=True)
    before = now
"""


@dataclass(frozen=True)
class Pause:
    """The machine stood still for so many seconds until a moment of the monotonic clock."""

    end: float
    seconds: float


class PauseWitness:
    """Notes pauses of the machine while the block runs."""

    def __init__(self) -> None:
        self.pauses: list[Pause] = []
        self.watching = False  # a user who may not set priorities sees none
        self.pid = 0
        self._ending = contextlib.ExitStack()

    def __enter__(self) -> "PauseWitness":
        program = _WITNESS.format(parent=os.getpid())
        process = self._ending.enter_context(
            subprocess.Popen(
                [sys.executable, "-S", "-c", program],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        )
        assert process.stdout is not None
        self.pid = process.pid
        self.watching = bool(process.stdout.readline())
        reader = threading.Thread(target=self._read, args=(process.stdout,), daemon=True)
        reader.start()
        self._ending.callback(reader.join)
        self._ending.callback(process.kill)
        return self

    def __exit__(self, *_failure: object) -> None:
        self.watching = False
        self._ending.close()

    def _read(self, lines: Iterable[str]) -> None:
        for line in lines:
            end, seconds = map(float, line.split())
            self.pauses.append(Pause(end, seconds))

    def since(self, moment: float) -> list[float]:
        """Return the seconds of each pause since a moment of the monotonic clock."""
        return [each.seconds for each in self.pauses if each.end > moment]


def main(seconds: float = 20.0) -> None:
    """Print the pauses of this machine while it does what it does now."""
    with PauseWitness() as witness:
        begin = time.monotonic()
        time.sleep(seconds)
        found = witness.since(begin)
        if not witness.watching:
            print("pauses cannot be seen: this user may not set a real-time priority")
        else:
            print(f"{len(found)} pauses, {1e3 * sum(found):.0f} ms of {seconds:g} s", end="")
            print(f", longest {1e3 * max(found, default=0.0):.0f} ms")


if __name__ == "__main__":
    main()
