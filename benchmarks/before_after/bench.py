"""The ML-1M steps and the softmax over a whole catalogue: the version before against this one.

The version before is taken from this repository's history and built beside the tree. Both run in
processes of their own and take turns. The protocol is benchmarks/protocols/before_after.md. Touch
this when another part of a step is made faster.
"""

import contextlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.bench.harness import Row, finish, median, note, spread
from slipstream.errors import SlipstreamError

ROOT = Path(__file__).parents[2]
WORK = ROOT / "runs/before_after"
# The last commit before linear layers and the full softmax were fused.
BEFORE = "827ed6f13c7ffcb992e915b239689de44346e2f2"
ROUNDS = 9
TOLERANCE = 1e-5  # of a value, between versions; more is another computation
SECONDS_ALLOWED = 600  # for one build
BEFORE_NAME, AFTER_NAME = "before", "after"


@dataclass(frozen=True)
class Job:
    """What is timed: so many calls a turn; `flops` of one call where a share of the peak counts."""

    name: str
    kind: str
    count: int
    sizes: dict[str, Any] = field(default_factory=dict)
    flops: float = 0.0


def softmax_job(tokens: int, items: int, width: int, count: int) -> Job:
    """Return the loss and its gradients: three products of tokens x items x width."""
    sizes = {"tokens": tokens, "items": items, "width": width}
    return Job("full softmax", "softmax", count, sizes, 6.0 * tokens * items * width)


PEAK = Job("peak", "product", 1, {}, 10 * 2.0 * 1024**3)
JOBS = (
    Job("ml-1m-hstu step", "steps", 3, {"recipe": "ml-1m-hstu", "windows": 128}),
    Job("ml-1m-hstu-full step", "steps", 3, {"recipe": "ml-1m-hstu-full", "windows": 128}),
    softmax_job(4_096, 12_101, 64, 3),
)
QUICK = (
    Job("ml-1m-hstu step", "steps", 1, {"recipe": "ml-1m-hstu", "windows": 4}),
    softmax_job(64, 500, 64, 1),
)


class Version:
    """A process that measures one version."""

    def __init__(self, tree: Path, threads: int) -> None:
        environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
        worker = str(Path(__file__).with_name("worker.py"))
        self.process = subprocess.Popen(
            [sys.executable, worker, str(tree), str(threads)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, job: Job, save_to: Path | None = None) -> list[float]:
        """Return the seconds of one turn; the values of its first call are saved on request."""
        assert self.process.stdin is not None and self.process.stdout is not None
        asked = asdict(job) | {"save_to": None if save_to is None else str(save_to)}
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SlipstreamError(f"a process that measures {job.name} ended; see its error above")
        seconds: list[float] = json.loads(line)["seconds"]
        return seconds


@contextlib.contextmanager
def versions(before: Path, threads: int) -> Iterator[dict[str, Version]]:
    """Start a process of each version, and end both."""
    started: dict[str, Version] = {}
    try:
        for name, tree in ((BEFORE_NAME, before), (AFTER_NAME, ROOT)):
            started[name] = Version(tree, threads)
        yield started
    finally:
        for each in started.values():
            each.process.kill()
            each.process.communicate()


def built(commit: str, work: Path) -> Path:
    """Return the tree of an earlier commit with its kernels built; made once."""
    tree, done = work / commit, work / commit / "built"
    if done.exists():
        return tree
    work.mkdir(parents=True, exist_ok=True)
    packed = work / f"{commit}.tar"
    note(f"building {commit}")
    try:
        packing = ["git", "-C", str(ROOT), "archive", "--output", str(packed), commit]
        subprocess.run(packing, check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        packed.unlink(missing_ok=True)
        raise SlipstreamError(
            f"this tree has no commit {commit} to compare with; clone the repository with its "
            "whole history (git fetch --unshallow)"
        ) from error
    with tarfile.open(packed) as file:
        file.extractall(tree, filter="data")
    packed.unlink()
    building = [sys.executable, "setup.py", "build_ext", "--inplace"]
    subprocess.run(building, cwd=tree, check=True, capture_output=True, timeout=SECONDS_ALLOWED)
    done.touch()
    return tree


def measure(before: Path, jobs: tuple[Job, ...], threads: int, rounds: int) -> list[Row]:
    """Time all jobs in turns; the first round is a warm-up, and its first values are compared."""
    seconds: dict[tuple[str, str], list[float]] = {}
    with versions(before, threads) as both, tempfile.TemporaryDirectory() as folder:
        note(f"{threads} threads, warm-up")
        differences = {job.name: difference_of(job, both, Path(folder)) for job in jobs}
        peaks = []
        for number in range(1, rounds + 1):
            note(f"{threads} threads, round {number} of {rounds}")
            peaks += [PEAK.flops / each for each in both[AFTER_NAME].run(PEAK)]
            for job in jobs:
                for name, version in both.items():
                    seconds.setdefault((job.name, name), []).extend(version.run(job))
    rows = []
    for job in jobs:
        old, new = seconds[job.name, BEFORE_NAME], seconds[job.name, AFTER_NAME]
        row: Row = {"variant": f"{job.name}, {threads} thread{'s' * (threads > 1)}"}
        row |= {"before_ms": 1e3 * median(old), "after_ms": 1e3 * median(new)}
        row |= {"speedup": median(old) / median(new), "spread": max(spread(old), spread(new))}
        row["difference"] = differences[job.name]
        if job.flops:
            row["mfu"] = job.flops / median(new) / max(peaks)
        rows.append({**row, "before_samples": old, "after_samples": new})
    return rows


def difference_of(job: Job, both: dict[str, Version], folder: Path) -> float:
    """Return the largest difference of a value, as a share of the largest value of its kind."""
    saved = {}
    for name, version in both.items():
        path = folder / f"{name}.npz"
        version.run(job, path)
        with np.load(path, allow_pickle=False) as values:
            saved[name] = dict(values)
    old, new = saved[BEFORE_NAME], saved[AFTER_NAME]
    return max(float(np.abs(new[key] - old[key]).max() / np.abs(old[key]).max()) for key in old)


def claims_of(rows: list[Row]) -> dict[str, float]:
    """Return the ratios by job and threads, and the worst difference."""
    claims = {}
    for row in rows:
        name, _, threads = row["variant"].partition(", ")
        key = f"{name.replace(' ', '_').replace('-', '_')}_{threads[0]}"
        claims[f"{key}_speedup"] = row["speedup"]
        if "mfu" in row:
            claims[f"{key}_mfu"] = row["mfu"]
    return claims | {"largest_difference": max(row["difference"] for row in rows)}


def run(quick: bool, json_path: Path | None) -> dict[str, Any]:
    """Measure on one thread and on two; versions that compute something else are refused."""
    before = built(BEFORE, WORK)
    jobs, rounds = (QUICK, 1) if quick else (JOBS, ROUNDS)
    rows = [row for threads in (1, 2) for row in measure(before, jobs, threads, rounds)]
    claims = claims_of(rows)
    if claims["largest_difference"] > TOLERANCE:
        raise SlipstreamError(
            f"the versions differ by {claims['largest_difference']:.2g} of a value, more than "
            f"{TOLERANCE:g}; a kernel computes something else, so there is nothing to compare"
        )
    return finish("before_after", rows, claims, json_path)
