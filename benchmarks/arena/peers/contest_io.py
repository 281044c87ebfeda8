"""What every contender reads and writes: the job, the split, the clock, the curve, the answers.

Touch it when the contract between the arena and the peers' scripts changes. It runs in each peer's
own environment, so it takes numpy and the standard library only, and Python 3.9 suffices.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arena.peers.contest_metrics import JUDGED_AT, list_metrics
from benchmarks.arena.peers.contest_split import TEST, Split

FAR_OVER = 2.0  # an epoch is cut short after so many budgets: some libraries would take hours
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)


def say(text: str) -> None:
    """Tell on stderr what the contender does."""
    print(text, file=sys.stderr, flush=True)


def copy_state(module: Any) -> dict[str, Any]:
    """Return a copy of a torch module's weights, which later training does not touch."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


@dataclass
class Job:
    """What one contender is asked to do."""

    split: Path
    out: Path
    model: str
    settings: dict[str, Any]
    seed: int
    threads: int
    minutes: float
    k: int
    request_time: bool
    epochs: int
    patience: int
    store: Path | None = None  # Slipstream's own form of the same data

    @classmethod
    def read(cls, path: str | None = None) -> Job:
        """Read JOB.json, the first argument of the command, and set the thread variables.

        `epochs` and `patience` leave the settings here; all others belong to the peer's model.
        Call it before torch is imported: the variables count only when its libraries load.
        """
        said = json.loads(Path(path or sys.argv[1]).read_text(encoding="utf-8"))
        settings = dict(said.get("settings", {}))
        job = cls(
            split=Path(said["split"]).resolve(),
            out=Path(said["out"]).resolve(),
            model=said["model"],
            settings=settings,
            seed=int(said["seed"]),
            threads=int(said["threads"]),
            minutes=float(said["minutes"]),
            k=int(said.get("k", 200)),
            request_time=bool(said.get("request_time", False)),
            epochs=int(settings.pop("epochs", 1000)),
            patience=int(settings.pop("patience", 10)),
            store=Path(said["store"]).resolve() if said.get("store") else None,
        )
        for name in THREAD_VARIABLES:
            os.environ[name] = str(job.threads)
        return job


class Clock:
    """Counts training seconds: what passes between start and stop."""

    def __init__(self) -> None:
        self._counted = 0.0
        self._since: float | None = None
        self._mark: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds so far, the running stretch included."""
        running = 0.0 if self._since is None else time.perf_counter() - self._since
        return self._counted + running

    def start(self) -> None:
        """Count from now on; nothing changes when it runs already."""
        if self._since is None:
            self._since, self._mark = time.perf_counter(), None

    def stop(self) -> None:
        """Stop counting; nothing changes when it stands already."""
        self._counted, self._since = self.seconds, None

    def mark(self) -> None:
        """Remember this moment for `stop_at_mark`."""
        self._mark = time.perf_counter()

    def stop_at_mark(self) -> None:
        """Stop counting as of the last mark; what passed since then was no training."""
        if self._since is not None:
            self._counted += max((self._mark or self._since) - self._since, 0.0)
            self._since = None

    @contextmanager
    def training(self) -> Iterator[None]:
        """Count while the block runs."""
        self.start()
        try:
            yield
        finally:
            self.stop()


class Progress:
    """Appends a line per epoch, so that a stopped run still shows its curve."""

    def __init__(self, out: Path) -> None:
        self._path = out / "progress.jsonl"
        self._path.write_text("", encoding="utf-8")

    def add(self, epoch: int, training_seconds: float, validation: dict[str, float]) -> None:
        """Write one epoch's line and say it."""
        line = {
            "epoch": epoch,
            "training_seconds": round(training_seconds, 3),
            "validation": validation,
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        quality = ", ".join(f"{name} {value:.4f}" for name, value in validation.items())
        say(f"epoch {epoch}: {training_seconds:.1f} s of training, {quality}")


class Contest:
    """One run: judges every epoch, keeps the best weights, says when training ends."""

    def __init__(self, job: Job, split: Split) -> None:
        self.job, self.split = job, split
        self.clock, self.progress = Clock(), Progress(job.out)
        self.best_weights: Any = None
        self.best_epoch, self.seconds_to_best = 0, 0.0
        self.best: dict[str, float] = {}
        self.stopped = "epochs"
        self.cut_short = False  # whether the last epoch was not finished
        self.training_peak_bytes = 0  # at the last judgement: training and validation
        self._marks = [(0, 0.0)]  # epochs done and training seconds at every judgement

    @property
    def epochs(self) -> int:
        """How many epochs were done when the last one was judged."""
        return self._marks[-1][0]

    @property
    def best_ndcg(self) -> float:
        """The best validation NDCG@10 so far."""
        return self.best.get(f"NDCG@{JUDGED_AT}", -1.0)

    def over_budget(self, times: float = 1.0) -> bool:
        """Tell whether training took more than the budget, or than a multiple of it."""
        return self.clock.seconds > times * self.job.minutes * 60.0

    def cuts_epoch(self) -> bool:
        """Tell, between two batches, whether this epoch takes far more than the budget."""
        if self.over_budget(FAR_OVER):
            self.cut_short = True
            say("this epoch is cut short: it takes far more than the budget")
        return self.cut_short

    def record(self, epoch: int, validation: dict[str, float], is_best: bool) -> None:
        """Write down an epoch's validation figures, and that it is the best one."""
        self._marks.append((epoch, self.clock.seconds))
        self.training_peak_bytes = peak_bytes()
        self.progress.add(epoch, self.clock.seconds, validation)
        if is_best:
            self.best, self.best_epoch = validation, epoch
            self.seconds_to_best = self.clock.seconds

    def epoch_done(self, top_UK: np.ndarray, copy_weights: Callable[[], Any]) -> bool:
        """Judge the epoch by its validation lists; return whether training ends here."""
        validation = list_metrics(top_UK, self.split.validation_U)
        is_best = validation[f"NDCG@{JUDGED_AT}"] > self.best_ndcg
        self.record(self.epochs + 1, validation, is_best)
        if is_best:
            self.best_weights = copy_weights()
        if self.epochs - self.best_epoch >= self.job.patience:
            self.stopped = "patience"
        elif self.over_budget():
            self.stopped = "budget"
        elif self.epochs < self.job.epochs:
            return False
        say(f"training ends ({self.stopped}): epoch {self.best_epoch} is the best")
        return True

    def finish(self, top_UK: np.ndarray, single: dict[str, Any], packages: Sequence[str]) -> None:
        """Write the test answers and the figures of the run; `single` joins the figures."""
        steps = np.diff(np.array(self._marks), axis=0)  # epochs and seconds between judgements
        figures: dict[str, Any] = {
            "epochs": self.epochs,
            "best_epoch": self.best_epoch,
            "validation": self.best,
            "training_seconds": self.clock.seconds,
            "seconds_to_best": self.seconds_to_best,
            "seconds_per_epoch": float(np.median(steps[:, 1] / steps[:, 0])),
            "peak_bytes": peak_bytes(),
            "training_peak_bytes": self.training_peak_bytes,
            "recommend_ms_p50": None,
            "recommend_ms_p99": None,
            "versions": versions(packages),
            "stopped": self.stopped,
            "cut_short": self.cut_short,
        }
        finish(self.job.out, top_UK, {**figures, **single})


def peak_bytes() -> int:
    """Return the largest resident memory of this process so far.

    The kernel's own mark of the address space counts: `ru_maxrss` also counts the process that
    started this one.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Return the installed versions of these distributions, and Python's."""
    found = {"python": sys.version.split()[0]}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def users_to_time(split: Split, count: int = 220) -> np.ndarray:
    """Return users, evenly spread over all askers of the test question, for single requests."""
    users_A = split.askers(TEST)
    if len(users_A) <= count:
        return users_A
    return users_A[np.linspace(0, len(users_A) - 1, count).astype(np.int64)]


def time_single(
    recommend_one: Callable[[int], object],
    users: Sequence[int] | np.ndarray,
    warm_up: int = 20,
    count: int = 200,
) -> dict[str, float]:
    """Time one user's request after another; return the median and the 99th percentile in ms."""
    if len(users) == 0:
        return {}
    say(f"timing {count} single requests")
    taken = []
    for turn in range(warm_up + count):
        user = int(users[turn % len(users)])
        started = time.perf_counter()
        recommend_one(user)
        taken.append((time.perf_counter() - started) * 1000.0)
    p50, p99 = np.percentile(taken[warm_up:], [50, 99])
    return {"recommend_ms_p50": float(p50), "recommend_ms_p99": float(p99)}


def finish(out: Path, top_UK: np.ndarray, figures: dict[str, Any]) -> None:
    """Write top.npy and then figures.json, each whole or not at all."""
    part = out / "top.npy.part"
    with part.open("wb") as file:
        np.save(file, np.ascontiguousarray(top_UK, dtype=np.int64))
    os.replace(part, out / "top.npy")
    part = out / "figures.json.part"
    part.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    os.replace(part, out / "figures.json")
    say(f"answers and figures are in {out}")
