"""Starts real gloo ranks for tests. One process imports everything once and forks the ranks.

`run_ranks(4, "tests.tables.test_exchange:check_steps", tmp_path, steps=3)` calls
`check_steps(rank, world, steps=3)` on four ranks with the default process group ready and returns
their JSON-able answers in rank order. When ranks fail, the test fails with the error of the rank
that failed first: the errors of its peers (connections that it closed) follow in one line each.
"""

import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LIMIT = 240.0  # seconds; only against hanging: a quiet machine needs a few
GRACE = 20.0  # seconds, at most, that peers get to notice a failure and write down their own


def environment(**more: str) -> dict[str, str]:
    """What ranks need: our sources, the loopback interface, one thread each."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return {**os.environ, "GLOO_SOCKET_IFNAME": loopback, "OMP_NUM_THREADS": "1", **more}


def run_ranks(
    world: int, work: str, scratch: Path, /, *, seconds: float = LIMIT, **arguments: Any
) -> list[Any]:
    """Return the answers of `world` ranks that each call `module:function`."""
    scratch.mkdir(parents=True, exist_ok=True)
    setting = [str(world), work, str(scratch), str(seconds), json.dumps(arguments)]
    process = subprocess.Popen(
        [sys.executable, str(HERE / "ranks_fixtures.py"), *setting],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,  # so that no rank is left behind, whatever ends this test
    )
    try:
        printed, errors = process.communicate(timeout=seconds + 3 * GRACE)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    assert process.returncode == 0, errors[-8000:]
    return json.loads(printed.strip().splitlines()[-1])


def _rank(
    rank: int, world: int, work: str, scratch: Path, seconds: float, arguments: dict[str, Any]
) -> int:
    """Run one rank's work; its answer or its failure is in a file before any peer can notice."""
    import torch.distributed as dist

    with open(scratch / f"stack-{rank}.txt", "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack)
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{scratch / 'meeting'}",
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=seconds),
            )
            module, _, function = work.partition(":")
            answer = getattr(importlib.import_module(module), function)(rank, world, **arguments)
            (scratch / f"answer-{rank}.json").write_text(json.dumps(answer))
            dist.barrier()
            return 0
        except BaseException:
            failure = {"time": time.monotonic(), "error": traceback.format_exc()}
            (scratch / f"failure-{rank}.json").write_text(json.dumps(failure))
            return 1
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def _fork(world: int, *work: Any) -> dict[int, int]:
    """Start the ranks; {process id: rank}."""
    children = {}
    for rank in range(world):
        if (pid := os.fork()) == 0:
            code = 1
            try:
                code = _rank(rank, world, *work)
            finally:
                sys.stderr.flush()
                os._exit(code)
        children[pid] = rank
    return children


def _wait(children: dict[int, int], seconds: float) -> tuple[dict[int, int], dict[int, int]]:
    """Wait for the ranks; (rank: wait status of those that ended, pid: rank of those that hang)."""
    ended: dict[int, int] = {}
    grace = min(GRACE, seconds)
    running, deadline = dict(children), time.monotonic() + seconds + grace
    while running and time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            time.sleep(0.005)
            continue
        ended[running.pop(pid)] = status
        if status:
            deadline = min(deadline, time.monotonic() + grace)
    return ended, running


def _end(running: dict[int, int]) -> None:
    """Let ranks that still run write down where they are, then end them."""
    for ending in (signal.SIGUSR1, signal.SIGKILL):
        for pid in running:
            os.kill(pid, ending)
        time.sleep(0.5 if running and ending == signal.SIGUSR1 else 0.0)
    for pid in running:
        os.waitpid(pid, 0)


def _report(scratch: Path, ended: dict[int, int], running: dict[int, int]) -> str | None:
    """Describe the failure: the first rank that failed in full, then the others in a line each."""
    found: list[tuple[float, int, str]] = []
    for rank, status in ended.items():
        path = scratch / f"failure-{rank}.json"
        if path.is_file():
            failure = json.loads(path.read_text())
            found.append((failure["time"], rank, failure["error"]))
        elif status:  # no exception, so no peer caused it: this rank is the origin
            signalled = os.WIFSIGNALED(status)
            how = f"ended by signal {os.WTERMSIG(status)}" if signalled else f"status {status}"
            found.append((0.0, rank, f"no exception: {how}"))
    lines = []
    if found:
        (_, first, error), *others = sorted(found)
        lines += [f"rank {first} failed first:", error.rstrip()]
        lines += [f"then rank {rank}: {text.rstrip().splitlines()[-1]}" for _, rank, text in others]
    for rank in running.values():
        lines += [f"rank {rank} was still running:", (scratch / f"stack-{rank}.txt").read_text()]
    return "\n".join(lines) or None


def main(world: int, work: str, scratch: Path, seconds: float, arguments: dict[str, Any]) -> int:
    import torch

    torch.set_num_threads(1)
    importlib.import_module(work.partition(":")[0])
    ended, running = _wait(_fork(world, work, scratch, seconds, arguments), seconds)
    _end(running)
    if (report := _report(scratch, ended, running)) is not None:
        print(report, file=sys.stderr)
        return 1
    answers = [json.loads((scratch / f"answer-{rank}.json").read_text()) for rank in range(world)]
    print(json.dumps(answers))
    return 0


if __name__ == "__main__":
    values = sys.argv
    sys.exit(
        main(int(values[1]), values[2], Path(values[3]), float(values[4]), json.loads(values[5]))
    )
