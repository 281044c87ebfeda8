"""Runs on disk in a few words: found below a folder, and held against each other.

Only the files of the runs are read, not their weights or data. Touch this when a summary or a
comparison should show more.
"""

import fcntl
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.config import flatten
from slipstream.errors import SlipstreamError
from slipstream.files import kind_of_directory, read_json

LOCK = ".lock"
DEPTH = 3  # folders below the given one in which runs are looked for
SPLITS = ("validation", "test")
MEANS = ("AUC", "GAUC", "NE")  # over the tasks of a ranking run
LOWER_IS_BETTER = ("NE",)


@dataclass(frozen=True)
class RunSummary:
    """What a run's files say about it."""

    directory: str
    name: str
    data: str
    data_digest: str
    status: str  # running, finished, stopped early, interrupted, failed
    step: int
    epoch: int
    best_step: int | None
    seconds: float  # of training
    age_seconds: float  # since its files changed last
    validation: dict[str, float]  # of the best evaluation
    test: dict[str, float]
    recipe: dict[str, Any]  # with full keys


@dataclass(frozen=True)
class RunComparison:
    """Several runs side by side: a list has one entry for each run, in their order."""

    runs: list[RunSummary]
    keys: dict[str, list[Any]]  # keys of the recipe whose values differ
    validation: dict[str, list[float | None]]
    test: dict[str, list[float | None]]
    best: dict[str, list[int]] = field(default_factory=dict)  # figure: places of the best runs
    same_data: bool = True


def summarise_run(run_dir: str | os.PathLike[str]) -> RunSummary:
    """Return what a run's files say about it."""
    directory = Path(run_dir)
    if kind_of_directory(directory) != "run":
        raise SlipstreamError(
            f"{directory} holds no run; give a directory that `slipstream train` wrote"
        )
    note = read_json(directory / "run.json")
    store = note.get("store", {})
    status = str(note.get("status", "unknown"))
    if status == "running" and not _is_locked(directory):
        status = "interrupted"  # its process was killed
    return RunSummary(
        directory=str(directory),
        name=str(note.get("name", directory.name)),
        data=str(store.get("directory", "")),
        data_digest=str(store.get("digest", "")),
        status=status,
        step=int(note.get("step") or 0),
        epoch=int(note.get("epoch") or 0),
        best_step=note.get("best_step"),
        seconds=float(note.get("seconds") or 0.0),
        age_seconds=max(time.time() - (directory / "run.json").stat().st_mtime, 0.0),
        validation=dict(note.get("metrics") or {}),
        test=dict(note.get("test") or {}),
        recipe=flatten(note.get("recipe") or {}),
    )


def _is_locked(directory: Path) -> bool:
    """Whether a process is training in a directory."""
    try:
        with (directory / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def find_runs(directory: str | os.PathLike[str]) -> list[RunSummary]:
    """Return the runs in and below a directory, the newest first."""
    root = Path(directory)
    if not root.is_dir():
        raise SlipstreamError(f"{root} is no directory; give the one that holds runs")
    patterns = ["/".join(["*"] * depth + ["run.json"]) for depth in range(DEPTH + 1)]
    places = sorted({path.parent for pattern in patterns for path in root.glob(pattern)})
    return sorted((summarise_run(place) for place in places), key=lambda run: run.age_seconds)


def compare_runs(run_dirs: Sequence[str | os.PathLike[str]]) -> RunComparison:
    """Hold runs against each other: what differs in their recipes, their figures, the best."""
    if len(run_dirs) < 2:
        raise SlipstreamError("give at least two runs to compare")
    runs = [summarise_run(run_dir) for run_dir in run_dirs]
    names = list(dict.fromkeys(key for run in runs for key in run.recipe))
    values = {name: [run.recipe.get(name) for run in runs] for name in names}
    figures = {
        split: {
            name: [getattr(run, split).get(name) for run in runs]
            for name in dict.fromkeys(key for run in runs for key in getattr(run, split))
        }
        for split in SPLITS
    }
    return RunComparison(
        runs,
        {key: found for key, found in values.items() if any(one != found[0] for one in found)},
        **figures,
        best={
            f"{split} {name}": places
            for split in SPLITS
            for name, found in figures[split].items()
            if (places := _best(name, found))
        },
        same_data=len({run.data_digest for run in runs}) == 1,
    )


def _best(name: str, values: list[float | None]) -> list[int]:
    """Return the places of the best value; none for what is no figure of quality."""
    kind = name.partition("@")[0].partition("/")[0]
    known = [value for value in values if value is not None and value == value]
    if (kind == name and name not in MEANS) or " " in kind or not known:
        return []
    best = min(known) if kind in LOWER_IS_BETTER else max(known)
    return [place for place, value in enumerate(values) if value == best]
