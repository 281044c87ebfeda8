"""Trains a run in children that are killed, and compares its end with an undisturbed run's.

Run by test_training_kill.py as a process of its own: it loads torch once and forks, so that every
session of the run is a real process, killed by a real SIGKILL, and still cheap. Usage:
kill_and_resume.py DIRECTORY SEED MODE, with MODE `times` (kills at random moments) or `writes`
(kills at chosen points of a checkpoint's way to the disk). Prints one JSON object.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from slipstream import files
from slipstream.training import checkpoint
from slipstream.training.run import train
from slipstream.training.telemetry import read_metrics
from tests.support.training_fixtures import small_recipe, small_store

ROUNDS = 6
RECIPE = small_recipe(
    tables={"optimizer": "rowwise_adam"},
    optimizer={"decay": "cosine", "warmup_steps": 5, "clip_norm": 1.0},
    train={
        "epochs": 12,
        "evaluate_every": 2,
        "checkpoint_every": 3,
        "keep_last": 2,
        "log_every": 2,
    },
)


def figures(recommender, store, recipe, which):
    """A stand-in for evaluation: after a wrong resume it would choose another best step."""
    value = float(recommender.catalogue_ND().double().sum().sin())
    return {"HR@10": value, "NDCG@10": 0.0}


def ends_or_gets_far(pid: int, metrics: Path, wanted: int) -> bool:
    """Wait until a session has written `wanted` lines or has ended; return whether it ended."""
    started = metrics.stat().st_mtime_ns if metrics.exists() else 0
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if (
            metrics.exists()
            and metrics.stat().st_mtime_ns != started
            and metrics.read_text().count("\n") >= wanted
        ):
            return False
        time.sleep(0.001)
    return True


def in_child(work) -> int:
    """Run `work` in a forked process; returns its process id."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return pid


def die_at(point: int) -> None:
    """From now on, the `point`-th flush or rename of a file is preceded by SIGKILL."""
    left = [point]

    def deadly(function):
        def call(*arguments):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments)

        return call

    files.fsync_path, files.os.replace = deadly(files.fsync_path), deadly(os.replace)


def outcome(run_dir: Path) -> tuple[dict, list, dict]:
    newest, best = (
        checkpoint.latest(run_dir / "checkpoints", kind)
        for kind in (checkpoint.LAST, checkpoint.BEST)
    )
    tensors = {
        f"{path.name}/{name}": value
        for path in (newest, best)
        for name, value in load_file(path / checkpoint.TENSORS).items()
    }
    records = [
        {
            key: value
            for key, value in record.items()
            if key not in ("tokens_per_second", "mfu", "memory_bytes")
        }
        for record in read_metrics(run_dir / "metrics.jsonl")
    ]
    return tensors, records, checkpoint.read_state(newest)


def main(directory: Path, seed: int, mode: str) -> dict:
    torch.set_num_threads(1)
    store, dice = small_store(directory / "store"), random.Random(seed)

    def session(run_dir: Path, point: int = 0) -> None:
        if point:
            die_at(point)
        train(RECIPE, store, run_dir, evaluate=figures, quiet=True)

    started = time.perf_counter()
    session(
        directory / "whole"
    )  # here, so that what torch loads on its first step is loaded once for all children
    seconds = time.perf_counter() - started
    kills, run_dir, standing = 0, directory / "cut", []
    for round_ in range(ROUNDS):
        if mode == "times":
            pid = in_child(lambda: session(run_dir))
            if not ends_or_gets_far(
                pid, run_dir / "metrics.jsonl", wanted=2 * round_ + dice.randrange(1, 4)
            ):
                time.sleep(dice.random() * 0.1 * seconds)
                os.kill(pid, signal.SIGKILL)
                kills += os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        else:
            point = dice.randrange(4, 40)
            pid = in_child(lambda point=point: session(run_dir, point))
            kills += os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        newest = checkpoint.latest(run_dir / "checkpoints") if run_dir.exists() else None
        standing.append(int(newest.name.partition("-")[2]) if newest else 0)
    status = os.waitpid(in_child(lambda: session(run_dir)), 0)[1]
    whole, cut = outcome(directory / "whole"), outcome(run_dir)
    same_tensors = whole[0].keys() == cut[0].keys() and all(
        torch.equal(value, cut[0][name]) for name, value in whole[0].items()
    )
    return {
        "last_status": status,
        "kills": kills,
        "standing": standing,
        "steps": whole[2]["step"],
        "same_tensors": same_tensors,
        "same_metrics": whole[1] == cut[1],
        "same_state": whole[2] == cut[2],
        "left_over": [
            path.name
            for place in (run_dir, run_dir / "checkpoints")
            for path in place.glob(".*")
            if path.name != ".lock"
        ],
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])))
