"""Starts real gloo ranks for tests: one process imports everything once and forks the ranks, so
that a world of four is cheap.

`run_ranks(4, "test_exchange:check_routes", tmp_path, seed=3)` calls `check_routes(rank, world,
seed=3)` on four ranks with the default process group ready, within a time limit, and returns their
JSON-able answers in rank order. A failing rank fails the test.
"""

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


def environment(**more: str) -> dict[str, str]:
    """What ranks need: our sources, the loopback interface, one thread each."""

    paths = os.environ["PYTHONPATH"]
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return {
        **os.environ,
        "PYTHONPATH": paths,
        "GLOO_SOCKET_IFNAME": loopback,
        "OMP_NUM_THREADS": "1",
        **more,
    }


def run_ranks(
    world: int, work: str, scratch: Path, /, *, seconds: float = 120, **arguments: Any
) -> list[Any]:
    """The answers of `world` ranks that each call `module:function`."""
    scratch.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        str(HERE / "ranks_fixtures.py"),
        str(world),
        work,
        str(scratch),
        str(seconds),
        json.dumps(arguments),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=seconds + 60, env=environment()
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def _rank(
    rank: int, world: int, work: str, scratch: Path, seconds: float, arguments: dict[str, Any]
) -> int:
    import torch.distributed as dist

    module, _, function = work.partition(":")
    meeting = f"file://{scratch / 'meeting'}"
    dist.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=world, timeout=timedelta(seconds=seconds)
    )
    try:
        answer = getattr(importlib.import_module(module), function)(rank, world, **arguments)
        (scratch / f"answer-{rank}.json").write_text(json.dumps(answer))
        dist.barrier()
        return 0
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        dist.destroy_process_group()


def main(world: int, work: str, scratch: Path, seconds: float, arguments: dict[str, Any]) -> int:
    import torch

    torch.set_num_threads(1)
    importlib.import_module(work.partition(":")[0])
    children = {}
    for rank in range(world):
        if (pid := os.fork()) == 0:
            code = 1
            try:
                code = _rank(rank, world, work, scratch, seconds, arguments)
            finally:
                sys.stderr.flush()
                os._exit(code)
        children[pid] = rank
    deadline, failed = time.monotonic() + seconds, []
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            rank = children.pop(pid)
            failed += [rank] if status else []
        elif time.monotonic() > deadline or failed:
            time.sleep(1.0 if failed else 0.0)
            for left in children:
                os.kill(left, signal.SIGKILL)
            failed += list(children.values())
            for left in children:
                os.waitpid(left, 0)
            break
        else:
            time.sleep(0.005)
    if failed:
        print(f"ranks {failed} failed or took longer than {seconds} s", file=sys.stderr)
        return 1
    print(
        json.dumps(
            [json.loads((scratch / f"answer-{rank}.json").read_text()) for rank in range(world)]
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(
        main(
            int(sys.argv[1]),
            sys.argv[2],
            Path(sys.argv[3]),
            float(sys.argv[4]),
            json.loads(sys.argv[5]),
        )
    )
