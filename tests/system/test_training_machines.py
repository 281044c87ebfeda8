"""Training on several machines as the guide shows it, each machine a torchrun of this one.

The elastic run loses a machine for good and ends with the other. Slurm does not run here: its
script is checked by bash, and started with stand-ins for `srun` and `scontrol`.
"""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli.app import run_command
from tests.support.ranks_fixtures import environment
from tests.support.redis_server import free_port
from tests.support.serving_fixtures import wait_until

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(300)]
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "deploy" / "slurm" / "train.sbatch"
SMALL = ("model.dim=16", "heads=2", "threads=1", "sampler.batch_size=16", "evaluate_every=1000")
Machine = subprocess.Popen[bytes]
LONG = 200.0  # seconds; only ends a run that hangs


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("machines") / "store"
    words = ["data", "prepare", "synthetic", "--users", "60", "--items", "50", "--out", str(place)]
    assert run_command(words) == 0
    return place


def guide_command(kind: str, data: Path, out: Path, *more: str) -> list[str]:
    """The guide's torchrun command with `--nnodes` of a kind, for this machine."""
    text = (ROOT / "docs/guides/many-ranks.md").read_text().replace("\\\n", " ")
    (found,) = re.findall(rf"^ {{4}}(torchrun --nnodes {kind} .*)$", text, re.MULTILINE)
    words = shlex.split(found.replace("HOST:PORT", f"127.0.0.1:{free_port()}"))
    words[words.index("--nproc-per-node") + 1] = "1"
    given = [f"data={data}" if word.startswith("data=") else word for word in words[1:]]
    launcher = [sys.executable, "-m", "torch.distributed.run"]
    return [*launcher, *given, *SMALL, *more, "--out", str(out)]


@contextlib.contextmanager
def machines(command: list[str], count: int, place: Path) -> Iterator[list[Machine]]:
    """The same command on so many machines, each a session of its own that can be killed whole."""
    started: list[Machine] = []
    with contextlib.ExitStack() as files:
        for number in range(count):
            log = files.enter_context((place / f"machine-{number}.log").open("wb"))
            started.append(
                subprocess.Popen(
                    # The first is the one that the others meet at, as a real one finds by its name.
                    [*command[:3], "--rdzv-conf", f"is_host={int(not number)}", *command[3:]],
                    env=environment(PYTHONPATH=os.environ["PYTHONPATH"]),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
        try:
            yield started
        finally:
            for process in started:
                lose(process)


def lose(process: Machine) -> None:
    """Kill a machine: its torchrun and the ranks of its session."""
    ranks = []
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        ranks = [int(word) for word in children.split()]
    for number in (process.pid, *ranks):
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    process.wait(LONG)


def note(out: Path) -> dict[str, Any]:
    """What a run says of itself so far."""
    found: dict[str, Any] = json.loads((out / "run.json").read_text())
    return found


def ranks_of(out: Path) -> int:
    """On how many ranks the newest session of a run is; 0 before the first one."""
    return int(note(out)["machine"]["ranks"]) if (out / "run.json").exists() else 0


def logged(out: Path) -> int:
    """How many lines a run has logged."""
    path = out / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def said(place: Path) -> str:
    """The end of what each machine printed."""
    return "\n".join(path.read_text()[-3000:] for path in sorted(place.glob("machine-*.log")))


def test_two_machines_train_one_run(data: Path, tmp_path: Path):
    command = guide_command("2", data, tmp_path / "run", "max_steps=6")
    with machines(command, 2, tmp_path) as both:
        assert [process.wait(LONG) for process in both] == [0, 0], said(tmp_path)
    found = note(tmp_path / "run")
    assert (found["status"], found["step"], found["machine"]["ranks"]) == ("finished", 6, 2)


def test_an_elastic_run_goes_on_without_a_machine_that_is_lost(data: Path, tmp_path: Path):
    out, more = tmp_path / "run", ("epochs=1000000", "checkpoint_every=20", "log_every=10")
    with machines(guide_command("1:4", data, out, *more), 2, tmp_path) as (first, second):
        wait_until(lambda: ranks_of(out) == 2 and logged(out) > 5, LONG)
        lose(second)
        wait_until(lambda: first.poll() is not None or ranks_of(out) == 1, LONG)
        before = logged(out)
        wait_until(lambda: first.poll() is not None or logged(out) > before + 5, LONG)
        assert first.poll() is None, said(tmp_path)
        first.terminate()  # the rank that is left saves, and the same command would continue
        first.wait(LONG)
    found = note(out)
    assert found["status"] == "interrupted" and found["step"] > 40, said(tmp_path)


def test_the_batch_script_is_bash_and_its_options_are_slurms():
    assert subprocess.run(["bash", "-n", str(SCRIPT)], timeout=60).returncode == 0
    options = re.findall(r"^#SBATCH --([\w-]+)(?:=\S+)?$", SCRIPT.read_text(), re.MULTILINE)
    known = {"job-name", "nodes", "ntasks-per-node", "cpus-per-task", "time", "signal"}
    assert set(options) == known | {"requeue", "open-mode"}
    before = SCRIPT.read_text().partition("set -euo")[0]
    assert len(re.findall(r"^#SBATCH", before, re.MULTILINE)) == len(options), "sbatch stops there"


def test_the_batch_script_trains_with_stand_ins_for_slurm(data: Path, tmp_path: Path):
    tools = {
        "srun": 'exec "$@"',
        "scontrol": '[ "$1 $2" = "show hostnames" ] && printf "127.0.0.1\nother\n"',
        "torchrun": f'exec {shlex.quote(sys.executable)} -m torch.distributed.run "$@"',
    }
    for name, line in tools.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "1", "SLURM_JOB_ID": "7"}
    slurm |= {"SLURM_CPUS_PER_TASK": "2", "RANKS": "2", "PORT": str(free_port())}
    slurm |= {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    words = ["retrieval-default", f"data={data}", *SMALL, "max_steps=4"]
    done = subprocess.run(
        ["bash", str(SCRIPT), *words, "--out", str(tmp_path / "run")],
        env=environment(PYTHONPATH=os.environ["PYTHONPATH"], **slurm),
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = note(tmp_path / "run")
    assert (found["status"], found["step"], found["machine"]["ranks"]) == ("finished", 4, 2)
