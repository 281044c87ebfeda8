"""Ranks of a benchmark: one process each on this machine, limited in time, none left running.

A rank is `python -m MODULE RANK …`. The last line that rank 0 prints is the benchmark's result, as
JSON. The first rank that fails ends the others, and its error is reported. Touch this when ranks
are started in another way.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_POLL_SECONDS = 0.05


def run_ranks(
    module: str,
    arguments: Sequence[str],
    *,
    world: int,
    seconds_allowed: float,
    prefix: Callable[[int], Sequence[str]] = lambda rank: (),
    environment: Callable[[int], Mapping[str, str]] = lambda rank: {},
) -> Any:
    """Run the ranks of `module` and return the result of rank 0.

    `prefix` and `environment` place a rank, for example in a network namespace.
    """
    with tempfile.TemporaryDirectory(prefix="slipstream-ranks-") as scratch, ExitStack() as opened:
        ranks, streams = [], []
        try:
            for rank in range(world):
                variables = {
                    **os.environ,
                    "GLOO_SOCKET_IFNAME": LOOPBACK,
                    "OMP_NUM_THREADS": "1",
                    **environment(rank),
                }
                # Into files: a pipe that nobody empties would stop a rank that prints a lot.
                out, errors = (
                    opened.enter_context(open(os.path.join(scratch, f"{rank}.{name}"), "w+b"))
                    for name in ("out", "err")
                )
                streams.append((out, errors))
                command = [*prefix(rank), sys.executable, "-m", module, str(rank), *arguments]
                ranks.append(subprocess.Popen(command, env=variables, stdout=out, stderr=errors))
            _wait(ranks, seconds_allowed)
            for number, (process, (_, errors)) in enumerate(zip(ranks, streams, strict=True)):
                if process.poll() not in (None, 0):
                    errors.seek(0)
                    message = errors.read().decode(errors="replace").strip()[-3000:]
                    raise RuntimeError(
                        f"rank {number} of {module} failed with exit code {process.poll()}: "
                        f"{message}"
                    )
            if any(process.poll() is None for process in ranks):
                raise TimeoutError(f"{module} did not end within {seconds_allowed:.0f} s")
            answer, _ = streams[0]
            answer.seek(0)
            return json.loads(answer.read().strip().splitlines()[-1])
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                    process.wait()


def _wait(ranks: Sequence[subprocess.Popen[bytes]], seconds_allowed: float) -> None:
    """Wait until all ranks have ended, one has failed, or the time is up."""
    deadline = time.monotonic() + seconds_allowed
    while time.monotonic() < deadline:
        ended = [rank.poll() for rank in ranks]
        if all(code is not None for code in ended) or any(code not in (None, 0) for code in ended):
            return
        time.sleep(_POLL_SECONDS)
