"""Starts the workers of a study, watches them, and ends them: single workers, then groups of ranks.

Workers stay in the process group of the command, so Ctrl-C reaches all of them. Touch this when
workers are started or stopped in another way.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import slipstream
from benchmarks.staleness.worker import STOPPED, Session
from slipstream.errors import SlipstreamError

POLL_SECONDS = 0.2
PATIENCE_SECONDS = 20.0  # a worker that was asked to stop finishes its step


def work_off(session: Session, crew_sizes: list[int], jobs: int, watch: Callable[[], None]) -> None:
    """Do every run that is left and call `watch` meanwhile; a failing worker ends the study."""
    scratch = Path(session.scratch)
    for ranks in crew_sizes:
        shared = replace(session, ranks=ranks)
        shared.save(scratch / f"session-{ranks}.json")
        with ExitStack() as stack:
            workers = [
                stack.enter_context(_Worker(scratch, ranks, number))
                for number in range(jobs if ranks == 1 else ranks)
            ]
            while any(worker.running() for worker in workers):
                watch()
                time.sleep(POLL_SECONDS)
                for worker in workers:
                    worker.raise_failure()
            for worker in workers:
                worker.raise_failure()
    watch()


class _Worker:
    """One worker process and its log."""

    def __init__(self, scratch: Path, ranks: int, number: int) -> None:
        self.log = scratch / f"worker-{ranks}-{number}.log"
        rank = number if ranks > 1 else 0
        self.command = [
            sys.executable,
            "-m",
            "benchmarks.staleness.worker",
            str(scratch / f"session-{ranks}.json"),
            str(rank),
        ]

    def __enter__(self) -> "_Worker":
        sources = str(Path(slipstream.__file__).parent.parent)
        paths = os.pathsep.join([sources, *filter(None, [os.environ.get("PYTHONPATH")])])
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        environment = {
            **os.environ,
            "PYTHONPATH": paths,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": loopback,
        }
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            environment.pop(name, None)
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=subprocess.STDOUT, env=environment
            )
        return self

    def running(self) -> bool:
        return self.process.poll() is None

    def raise_failure(self) -> None:
        """Raise the last line of a failed worker; one stopped from outside stops the study."""
        code = self.process.poll()
        if code in (None, 0):
            return
        if code in (STOPPED, -signal.SIGINT, -signal.SIGTERM):
            raise KeyboardInterrupt
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        reason = lines[-1].strip() if lines else f"it ended with {code}"
        raise SlipstreamError(
            f"a worker of the study failed: {reason}; run the same command again to go on"
        )

    def __exit__(self, *failure: object) -> None:
        if self.running():
            self.process.terminate()
            try:
                self.process.wait(PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()
