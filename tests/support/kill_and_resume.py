"""Trains a run in children that are killed, and compares its end with an undisturbed run's.

Run by test_training_kill.py as a process of its own: it loads torch once and forks, so that every
session of the run is a real process, killed by a real SIGKILL, and still cheap. Usage:
kill_and_resume.py DIRECTORY SEED MODE TABLES, with MODE `times` (kills at random moments) or
`writes` (kills at chosen points of a checkpoint's way to the disk), and TABLES `whole` or, with
incremental checkpoints that begin anew now and then, a tier. Prints one JSON object.
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

from slipstream import files, uncached_files
from slipstream.tables.embedding_table import save_touched
from slipstream.training import checkpoint, checkpoint_writer, row_files
from slipstream.training.recipe import Recipe
from slipstream.training.run import open_run, train
from slipstream.training.telemetry import read_metrics
from tests.support.training_fixtures import small_recipe, small_store

ROUNDS = 6
TABLES = {
    "whole": {},
    "memory": {},
    "disk": {"tier": "disk", "cache_bytes": 1 << 16},
    "hashed": {"tier": "hashed", "admit_after": 2, "max_rows": 160},
}


def recipe_of(tables: str, run_dir: Path) -> Recipe:
    """The recipe of a run; rows on disk lie beside it."""
    place = {"directory": f"{run_dir}-rows"} if tables == "disk" else {}
    return small_recipe(
        tables={"optimizer": "rowwise_adam", **TABLES[tables], **place},
        optimizer={"decay": "cosine", "warmup_steps": 5, "clip_norm": 1.0},
        train={
            "epochs": 12,
            "evaluate_every": 2,
            "checkpoint_every": 3,
            "keep_last": 2,
            "log_every": 2,
            "schedule": "synchronous",
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
    uncached_files.os.fsync = deadly(os.fsync)


def rows_of(run_dir: Path, store, which: str) -> dict[str, torch.Tensor]:
    """Every row a checkpoint holds, by key, and the ids that wait for one."""
    found = {}
    for name, table in open_run(run_dir, store, which)[2].tables.tables.items():
        saved = save_touched(table)
        order = saved["keys"].argsort()
        found |= {f"{which}/{name}/{entry}": value[order] for entry, value in saved.items()}
        if table.forgets:
            for entry, value in table.admission().items():
                found[f"{which}/{name}/{entry}"] = value.sort()[0]
    return found


def outcome(run_dir: Path, store) -> tuple[dict, list, dict]:
    newest, best = (
        checkpoint.latest(run_dir / "checkpoints", kind)
        for kind in (checkpoint.LAST, checkpoint.BEST)
    )
    tensors = {
        f"{path.name}/{name}": value
        for path in (newest, best)
        for name, value in load_file(path / checkpoint.TENSORS).items()
    }
    for which in ("last", "best"):
        tensors |= rows_of(run_dir, store, which)
    records = [
        {
            key: value
            for key, value in record.items()
            if key not in ("tokens_per_second", "mfu", "memory_bytes")
        }
        for record in read_metrics(run_dir / "metrics.jsonl")
    ]
    state = checkpoint.read_state(newest)
    state.pop("row_files")  # which checkpoint wrote a row depends on when sessions began
    return tensors, records, state


def main(directory: Path, seed: int, mode: str, tables: str) -> dict:
    torch.set_num_threads(1)
    larger = {} if tables == "whole" else {"users": 40, "items": 300}
    store = small_store(directory / "store", **larger)
    dice = random.Random(seed)
    if tables != "whole":
        checkpoint.WHOLE_BYTES, row_files.FILE_BYTES = 0, 1 << 11
        checkpoint_writer.MOST_CHANGED, checkpoint_writer.MOST_NUMBERS = 0.9, 3

    def session(run_dir: Path, point: int = 0) -> None:
        if point:
            die_at(point)
        train(recipe_of(tables, run_dir), store, run_dir, evaluate=figures, quiet=True)

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
            point = dice.randrange(4, 40 if tables == "whole" else 160)
            pid = in_child(lambda point=point: session(run_dir, point))
            kills += os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        newest = checkpoint.latest(run_dir / "checkpoints") if run_dir.exists() else None
        standing.append(int(newest.name.partition("-")[2]) if newest else 0)
    status = os.waitpid(in_child(lambda: session(run_dir)), 0)[1]
    whole, cut = outcome(directory / "whole", store), outcome(run_dir, store)
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
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])))
