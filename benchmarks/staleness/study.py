"""The staleness study: the same model, seeds and batches under every schedule, with paired tests.

    DIR/results/…json     one file per finished run; a stopped study does only the others
    DIR/staleness.json    everything that was found
    DIR/staleness.md      the tables
    DIR/*.png             the plots

Touch this when the study gets another step; problems are in cases.py, schedules in variants.py.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.staleness.cases import QUICK, Case, named_cases, open_store
from benchmarks.staleness.crew import work_off
from benchmarks.staleness.plan import RESULTS, plan
from benchmarks.staleness.plots import draw_collisions, draw_differences
from benchmarks.staleness.progress import Watcher
from benchmarks.staleness.summary import summarise
from benchmarks.staleness.tables import markdown
from benchmarks.staleness.worker import Session
from slipstream.errors import SlipstreamError
from slipstream.files import atomic_file, write_json
from slipstream.interrupts import terminated_as_interrupted

LOCK = ".lock"


def run_study(
    out: Path,
    data: Path,
    *,
    seeds: int = 5,
    datasets: Sequence[str] = (),
    variants: Sequence[str] | None = None,
    jobs: int = 2,
    quick: bool = False,
    report_only: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """Do every missing run (unless `report_only`), then write tables and plots of all."""
    if seeds < 2:
        raise SlipstreamError(f"paired tests need at least two seeds, got --seeds {seeds}")
    cases = chosen_cases(datasets, quick)
    (out / RESULTS).mkdir(parents=True, exist_ok=True)
    chosen = None if variants is None else tuple(variants)
    stores = {case.name: open_store(case, data, out) for case in cases}
    numbers = list(range(1, seeds + 1))
    runs = plan(cases, {name: store.digest for name, store in stores.items()}, numbers, chosen)
    if not report_only:
        with _sole_study(out), _scratch(out) as scratch, terminated_as_interrupted():
            names = [case.name for case in cases]
            session = Session(
                names,
                numbers,
                None if chosen is None else list(chosen),
                str(data),
                str(out),
                str(scratch),
                os.getpid(),
            )
            with Watcher(runs, out, jobs, console) as watch:
                left = {run.variant.ranks for run in runs if run.name not in watch.done}
                try:
                    work_off(session, sorted(left), jobs, watch)
                except KeyboardInterrupt:
                    watch.console.print(
                        f"stopped with {len(watch.done)} of {len(runs)} runs done; the same "
                        "command goes on"
                    )
                    raise
    summary = summarise(runs, stores, out)
    write_report(summary, out)
    return summary


def chosen_cases(datasets: Sequence[str], quick: bool) -> list[Case]:
    """Return the problems of a study."""
    return [QUICK] if quick else named_cases(tuple(datasets))


def write_report(summary: dict[str, Any], out: Path) -> None:
    """Write the summary as JSON, Markdown and pictures."""
    write_json(out / "staleness.json", summary)
    with atomic_file(out / "staleness.md") as path:
        path.write_text(markdown(summary), encoding="utf-8")
    draw_differences(summary, out / "differences.png")
    draw_collisions(summary, out / "collisions.png")


@contextlib.contextmanager
def _sole_study(out: Path) -> Iterator[None]:
    with (out / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise SlipstreamError(
                f"another study is running in {out}; wait for it, or choose another --out"
            ) from error
        yield


@contextlib.contextmanager
def _scratch(out: Path) -> Iterator[Path]:
    """Make a folder for this session; what a killed session left is removed first."""
    for old in out.glob("session-*"):
        shutil.rmtree(old, ignore_errors=True)
    directory = Path(tempfile.mkdtemp(prefix="session-", dir=out))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
