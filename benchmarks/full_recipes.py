"""Every shipped recipe at its full size: three steps each, by the command a user types.

A run that fails is a row that says so. Finished runs are kept in runs/full_recipes-bench and not
repeated; remove that folder to start anew. The protocol is benchmarks/protocols/full_recipes.md.
Touch this when a recipe needs other data to show that it trains.
"""

import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.command import run_measurement
from slipstream.bench.harness import Row, finish, note
from slipstream.config import RECIPES
from slipstream.files import read_json, write_json
from slipstream.training.telemetry import read_metrics

WORK = Path("runs/full_recipes-bench")
STEPS, SECONDS_ALLOWED = 3, 1_800.0
# The synthetic log has two actions and one item feature.
SYNTHETIC_RANKING = (
    "tasks.click.column=click",
    "tasks.like.column=like",
    "tasks.long_view.column=click",
    "item_features=[topic]",
    "user_features=[]",
)
# One rank's part of a step that a cluster shares.
ONE_RANK_OF_LONG = ("sampler.token_budget=8192",)


@dataclass(frozen=True)
class Twin:
    """A synthetic log in place of a recipe's own data."""

    users: int
    items: int
    topics: int = 50
    lengths: str = "movielens"


MOVIELENS = Twin(6_040, 3_706)
TWINS = {
    "kuairand-1k": Twin(300, 4_369_953, 2_000, "kuairand-1k"),
    "kuairand-27k": Twin(60, 32_038_725, 10_000, "kuairand-27k"),
    "synthetic-100m": Twin(5_000, 100_000_000, 10_000),
}
QUICK = ("demo", "ml-1m-sasrec")


def twin_of(recipe: str) -> tuple[str, Twin]:
    """Return the name and shape of the log that stands for a recipe's data."""
    found = (each for each in TWINS.items() if recipe.startswith(each[0]))
    return next(found, ("movielens", MOVIELENS))


def overrides_of(recipe: str) -> tuple[str, ...]:
    """Return what a recipe needs to run on a synthetic log, on one rank."""
    if recipe == "kuairand-pure-ranking":
        return SYNTHETIC_RANKING
    return ONE_RANK_OF_LONG if recipe.startswith("kuairand-27k") else ()


def prepare_twin(work: Path, name: str, twin: Twin) -> Path:
    """Make a log once; later runs find it."""
    out = work / "data" / name
    if not (out / "store.json").exists():
        note(f"a synthetic log like {name}")
        words = ["--users", str(twin.users), "--items", str(twin.items)]
        words += ["--topics", str(twin.topics), "--lengths", twin.lengths, "--out", str(out)]
        command = [sys.executable, "-m", "slipstream", "data", "prepare", "synthetic", *words]
        subprocess.run(command, check=True, timeout=SECONDS_ALLOWED, stdout=subprocess.DEVNULL)
    return out


def train(recipe: str, store: Path, scratch: Path) -> Row:
    """Run three steps in a process of their own; return what they took, or why they failed."""
    out = scratch / "run"
    words = [f"data={store.absolute()}", f"train.max_steps={STEPS}", "train.evaluate_every=0"]
    words += ["train.log_every=1", f"tables.directory={scratch / 'rows'}"]
    if "tier: disk" not in (RECIPES / f"{recipe}.yaml").read_text():
        words.pop()
    words += [*overrides_of(recipe), "--out", str(out)]
    begin = time.perf_counter()
    with open(scratch / "said", "w+b") as said:
        command = [sys.executable, "-m", "slipstream", "train", recipe, *words]
        process = subprocess.Popen(command, stdout=said, stderr=said)
        peak, code = _wait(process, begin)
        said.seek(0)
        last_words = said.read().decode(errors="replace").strip().splitlines()[-1:]
    row: Row = {"variant": recipe, "seconds": time.perf_counter() - begin, "peak GB": peak / 1e9}
    budget = (
        ", ".join(overrides_of(recipe)) if recipe.startswith("kuairand-27k") else "the recipe's"
    )
    row["token budget"] = budget.removeprefix("sampler.token_budget=")
    if code != 0:
        return {**row, "failure": f"exit {code}: {' '.join(last_words)}"}
    steps = [each for each in read_metrics(out / "metrics.jsonl") if "loss" in each]
    row["s a step"] = read_json(out / "run.json")["seconds"] / len(steps)
    row["loss"] = steps[-1]["loss"]
    finite = len(steps) == STEPS and math.isfinite(row["loss"])
    return {**row, "failure": "" if finite else f"{len(steps)} steps, loss {row['loss']}"}


def _wait(process: subprocess.Popen[bytes], begin: float) -> tuple[int, int]:
    """Wait for a process, at most so long; return its peak resident bytes and its exit code."""
    while True:
        done, status, usage = os.wait4(process.pid, os.WNOHANG)
        if done:
            process.returncode = os.waitstatus_to_exitcode(status)
            return usage.ru_maxrss * 1024, process.returncode
        if time.perf_counter() - begin > SECONDS_ALLOWED:
            process.kill()
        time.sleep(0.2)


def run(quick: bool = False, json_path: Path | None = None) -> dict[str, Any]:
    """Train every recipe for three steps; `quick` takes two small ones."""
    names = sorted(path.stem for path in RECIPES.glob("*.yaml"))
    work = Path(tempfile.mkdtemp(prefix="slipstream-full-")) if quick else WORK
    kept: dict[str, Row] = {}
    try:
        work.mkdir(parents=True, exist_ok=True)
        if (work / "rows.json").exists():
            kept = read_json(work / "rows.json")
        for name in QUICK if quick else names:
            if name in kept:
                continue
            store = prepare_twin(work, *twin_of(name))
            note(f"{name}: {STEPS} steps")
            # Beside the data: the system's temporary directory may be in memory.
            with tempfile.TemporaryDirectory(dir=work) as scratch:
                kept[name] = train(name, store, Path(scratch))
            write_json(work / "rows.json", kept)
    finally:
        if quick:
            shutil.rmtree(work, ignore_errors=True)
    rows = list(kept.values())
    failed = sum(bool(row["failure"]) for row in rows)
    claims = {"recipes": float(len(rows)), "failed": float(failed)}
    return finish("full_recipes", rows, claims, json_path)


if __name__ == "__main__":
    run_measurement(run, __doc__)
