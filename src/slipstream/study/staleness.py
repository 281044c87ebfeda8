"""The staleness study: the same model, seeds and batches under every schedule, judged with intervals and paired tests.

    DIR/results/…json     one file per finished run; a study that was stopped goes on with the others
    DIR/staleness.json    everything that was found
    DIR/staleness.md      the tables
    DIR/*.png             the plots
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

from slipstream.errors import SlipstreamError
from slipstream.files import write_json
from slipstream.study.cases import QUICK, Case, Say, named_cases, open_store
from slipstream.study.crew import work_off
from slipstream.study.plan import RESULTS, plan
from slipstream.study.progress import Watcher
from slipstream.study.worker import Session

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
    say: Say | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Do every run that is not done yet, then write tables and plots of all of them."""
    if seeds < 2:
        raise SlipstreamError(f"paired tests need at least two seeds, got --seeds {seeds}")
    cases = [QUICK] if quick else named_cases(tuple(datasets))
    (out / RESULTS).mkdir(parents=True, exist_ok=True)
    with _sole_study(out), _scratch(out) as scratch:
        stores = {case.name: open_store(case, data, out, say).digest for case in cases}
        numbers = list(range(1, seeds + 1))
        runs = plan(cases, stores, numbers, None if variants is None else tuple(variants))
        session = Session(
            [case.name for case in cases], numbers, None if variants is None else list(variants), str(data), str(out),
            str(scratch), os.getpid(),
        )
        with Watcher(runs, out, jobs, console) as watch:
            left = [run for run in runs if run.name not in watch.done]
            work_off(session, sorted({run.variant.ranks for run in left}), jobs, watch)
    return {}


@contextlib.contextmanager
def _sole_study(out: Path) -> Iterator[None]:
    with (out / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise SlipstreamError(f"another study is running in {out}; wait for it, or choose another --out") from error
        yield


@contextlib.contextmanager
def _scratch(out: Path) -> Iterator[Path]:
    """A folder of this session alone; what a killed session left goes first."""
    for old in out.glob("session-*"):
        shutil.rmtree(old, ignore_errors=True)
    directory = Path(tempfile.mkdtemp(prefix="session-", dir=out))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
