"""A cell of the contest: one contender on one data set with one seed, in a process of its own.

Touch this when contenders are started, limited or checked in another way. A finished cell is kept,
so a stopped contest goes on where it was.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arena.contenders import Contender
from benchmarks.arena.environments import last_line
from benchmarks.arena.peers.contest_io import THREAD_VARIABLES
from benchmarks.arena.peers.contest_metrics import list_metrics
from benchmarks.arena.peers.contest_split import TEST, Split, ragged
from slipstream.errors import SlipstreamError
from slipstream.files import read_json, write_json

ROOT = Path(__file__).parents[2]
AT = (10, 50, 200)
LIST_LENGTH = max(AT)
FIGURES = (
    "epochs",
    "best_epoch",
    "seconds_to_best",
    "seconds_per_epoch",
    "peak_bytes",
    "training_peak_bytes",
    "recommend_ms_p50",
    "recommend_ms_p99",
)
# What `slipstream train` sets for itself, in glibc's words: freed memory is kept, not returned and
# mapped anew at each step. A contender that keeps memory has it.
ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str((1 << 31) - 1),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
POLL_SECONDS = 0.2
PATIENCE_SECONDS = 20.0  # for a contender that was asked to end
Say = Callable[[str], None]


class ContenderError(SlipstreamError):
    """A contender failed; the message is the one sentence of its row."""


@dataclass(frozen=True)
class Cell:
    """What is run, where its files are, and after how many seconds it is ended."""

    data: str
    contender: Contender
    seed: int
    directory: Path
    job: dict[str, Any]
    limit_seconds: float

    @property
    def title(self) -> str:
        """What progress calls it."""
        return f"{self.data}, {self.contender.name}, seed {self.seed}"

    def is_finished(self) -> bool:
        """Whether the same job was done before."""
        needed = [self.directory / name for name in ("job.json", "figures.json", "top.npy")]
        return all(path.is_file() for path in needed) and read_json(needed[0]) == self.job

    def sample(self) -> dict[str, Any]:
        """Return what the contender measured and what its lists are worth."""
        try:
            figures = read_json(self.directory / "figures.json")
            top_UK = np.load(self.directory / "top.npy", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise ContenderError(f"its answers cannot be read ({error})") from error
        lacking = [name for name in FIGURES if name not in figures]
        if lacking:
            raise ContenderError(
                f"its figures lack {', '.join(lacking)}; remove its cell and run the same command "
                "again"
            )
        split = Split(Path(self.job["split"]))
        check_lists(top_UK, split)
        lines = (self.directory / "progress.jsonl").read_text(encoding="utf-8").splitlines()
        curve = [json.loads(line) for line in lines if line]
        test = list_metrics(top_UK, split.test_U, AT)
        return {"seed": self.seed, "test": test, **figures, "curve": curve}


def check_lists(top_UK: np.ndarray, split: Split) -> None:
    """Raise unless the lists answer the test: unseen, trained items, none of them twice."""
    if top_UK.shape != (split.num_users, LIST_LENGTH) or top_UK.dtype.kind != "i":
        raise ContenderError(
            f"its answers have the shape {top_UK.shape}, not {(split.num_users, LIST_LENGTH)}"
        )
    if top_UK.min() < -1 or top_UK.max() >= split.num_items:
        raise ContenderError("its answers name items that the data does not have")
    owners, columns = np.nonzero(top_UK >= 0)
    answered = owners * split.num_items + top_UK[owners, columns]
    if len(np.unique(answered)) < len(answered):
        raise ContenderError("a list of its answers names an item twice")
    whose, _, rows = ragged(split.offsets_U1[:-1], split.lengths(TEST))
    if np.isin(answered, whose * split.num_items + split.items_N[rows]).any():
        raise ContenderError("a list of its answers names an item of the user's history")
    if not split.trained_I[top_UK[owners, columns]].all():
        raise ContenderError("its answers name an item that no training behaviour names")


def run_cell(cell: Cell, python: Path, say: Say) -> None:
    """Run a contender to its end; whatever stops this also ends the contender."""
    shutil.rmtree(cell.directory, ignore_errors=True)
    cell.directory.mkdir(parents=True)
    write_json(cell.directory / "job.json", cell.job)
    log = cell.directory / "log.txt"
    command = [str(python), str(cell.contender.script), str(cell.directory / "job.json")]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=cell.directory,
            env=_variables(cell),
            start_new_session=True,
        )
    try:
        _watch(process, cell, say)
    finally:
        end_group(process)
    if process.returncode:
        raise ContenderError(_reason(process.returncode, log))
    if not cell.is_finished():
        raise ContenderError(f"it ended without answers; {_where(log)}")


def _variables(cell: Cell) -> dict[str, str]:
    """Return the environment of a contender: threads, allocator, the contract's sources, no GPU."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    sources = [*([str(ROOT / "src")] if cell.contender.own else []), str(ROOT)]
    threads = dict.fromkeys(THREAD_VARIABLES, str(cell.job["threads"]))
    fixed = {"PYTHONPATH": os.pathsep.join(sources), "CUDA_VISIBLE_DEVICES": ""}
    allocator = ALLOCATOR if cell.contender.keeps_memory else {}
    return {**kept, **threads, **allocator, **fixed}


def _watch(process: subprocess.Popen[bytes], cell: Cell, say: Say) -> None:
    """Wait for the end and tell of every epoch; raise when the limit is over."""
    progress, told = cell.directory / "progress.jsonl", 0
    ends = time.monotonic() + cell.limit_seconds
    while process.poll() is None:
        if time.monotonic() > ends:
            raise ContenderError(
                f"it ran longer than {cell.limit_seconds / 60:.3g} minutes and was ended"
            )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(POLL_SECONDS)
        text = progress.read_text(encoding="utf-8") if progress.exists() else ""
        whole = text[: text.rfind("\n") + 1].splitlines()
        if len(whole) > told:
            told, last = len(whole), json.loads(whole[-1])
            say(
                f"{cell.title}: epoch {last['epoch']}, {last['training_seconds']:.0f} s of "
                f"training, validation NDCG@10 {last['validation']['NDCG@10']:.4f}"
            )


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a contender and what it started; one that does not end is killed."""
    if process.poll() is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _reason(code: int, log: Path) -> str:
    """Return why a contender failed: a signal, or the last line it wrote."""
    if code == -signal.SIGKILL:
        return f"it was killed, perhaps for want of memory; {_where(log)}"
    if code < 0:
        return f"it ended by {signal.Signals(-code).name}; {_where(log)}"
    return f"it failed ({last_line(log)[:200]}); {_where(log)}"


def _where(log: Path) -> str:
    """Say where a log is; results are published, so the place of the work folder is left out."""
    return f"see {'/'.join(log.parts[-5:])} in the work folder"
