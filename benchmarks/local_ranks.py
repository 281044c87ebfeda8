"""Ranks of a benchmark: one process each on this machine, bounded in time, none left behind.

A rank is `python -m MODULE RANK …`; what rank 0 prints last is one line of JSON, the benchmark's
result. The first rank that fails ends the others at once: its complaint is the one worth reading,
not the broken connections it leaves to its peers.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_LOOK_EVERY = 0.05  # seconds between two looks at the ranks


def run_ranks(
    module: str,
    told: Sequence[str],
    *,
    world: int,
    seconds_allowed: float,
    prefix: Callable[[int], Sequence[str]] = lambda rank: (),
    environment: Callable[[int], Mapping[str, str]] = lambda rank: {},
) -> Any:
    """What rank 0 of `module` answered; `prefix` and `environment` place a rank (in a network
    namespace, say).
    """
    with tempfile.TemporaryDirectory(prefix="slipstream-ranks-") as scratch:
        ranks, spoken = [], []
        try:
            for rank in range(world):
                surroundings = {
                    **os.environ,
                    "GLOO_SOCKET_IFNAME": LOOPBACK,
                    "OMP_NUM_THREADS": "1",
                    **environment(rank),
                }
                # Into files: a pipe that nobody empties would stop a talkative rank.
                paths = [os.path.join(scratch, f"{rank}.{stream}") for stream in ("out", "err")]
                files = [open(path, "w+b") for path in paths]
                spoken.append(files)
                command = [*prefix(rank), sys.executable, "-m", module, str(rank), *told]
                ranks.append(
                    subprocess.Popen(command, env=surroundings, stdout=files[0], stderr=files[1])
                )
            _wait(ranks, seconds_allowed)
            for number, (rank_process, (_, complaint)) in enumerate(
                zip(ranks, spoken, strict=True)
            ):
                if rank_process.poll() not in (None, 0):
                    complaint.seek(0)
                    said = complaint.read().decode(errors="replace").strip()[-3000:]
                    raise RuntimeError(
                        f"rank {number} of {module} failed with exit code {rank_process.poll()}: "
                        f"{said}"
                    )
            if any(rank_process.poll() is None for rank_process in ranks):
                raise TimeoutError(f"{module} did not end within {seconds_allowed:.0f} s")
            spoken[0][0].seek(0)
            return json.loads(spoken[0][0].read().strip().splitlines()[-1])
        finally:
            for rank_process in ranks:
                if rank_process.poll() is None:
                    rank_process.kill()
                    rank_process.wait()
            for file in (file for files in spoken for file in files):
                file.close()


def _wait(ranks: Sequence[subprocess.Popen[bytes]], seconds_allowed: float) -> None:
    """Until all have ended, one has failed, or the time is up."""
    deadline = time.monotonic() + seconds_allowed
    while time.monotonic() < deadline:
        ended = [rank.poll() for rank in ranks]
        if all(code is not None for code in ended) or any(code not in (None, 0) for code in ended):
            return
        time.sleep(_LOOK_EVERY)
