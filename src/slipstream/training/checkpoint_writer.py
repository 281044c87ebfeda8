"""Writes checkpoints behind the steps: a thread copies rows, writes them and names the directory.

`save` copies the dense part and takes a snapshot of the tables, whose rows are copied while the
next steps run (tables/row_snapshot.py). A checkpoint holds the rows that changed since the one
before, and links to that one's row files; where that is no longer worth it, it holds all rows
(`Chain`). Checkpoints appear in the order in which they were saved. An error of the thread is
raised by the next `save` or `wait`. On many ranks the threads agree in a process group of their
own. Touch this when a run waits for its checkpoints in another way; files are in checkpoint.py.
"""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slipstream.tables.communicator import Communicator
from slipstream.tables.hashed_table import HashedTable
from slipstream.tables.row_optimizers import State
from slipstream.tables.row_snapshot import RowSnapshot
from slipstream.training import row_files as files
from slipstream.training.checkpoint import (
    LAST,
    Snapshot,
    read_state,
    row_files,
    take_snapshot,
    write_snapshot,
)
from slipstream.training.ranks import ALONE, Ranks
from slipstream.training.recommender import Recommender
from slipstream.training.row_files import RowPiece

DISK_COPY_BYTES = 1 << 29  # kept rows that may wait, where tables are on disk to spare memory
LEAST_COPY_BYTES = 1 << 28
MOST_CHANGED = 0.5  # of a table's bytes: where more changed, all rows are written
MOST_NEWER, MOST_NUMBERS = 1.0, 64  # newer row files: bytes, as a share of the oldest, and numbers
_NICE = 5  # the thread gives way to those that compute
_NO_IDS = torch.empty(0, dtype=torch.int64)
_WRITE_SECONDS = 3600.0  # a rank may write so long before the others give it up


class CheckpointClock:
    """Tells every rank alike when the next checkpoint is due, by the clock of rank 0.

    Ranks look at the clock together at steps that they agree on: each time after half of what is
    left, by the steps' mean time. So they talk about ten times a checkpoint, not at every step.
    """

    def __init__(self, seconds: float | None, step: int, ranks: Ranks = ALONE) -> None:
        self._seconds, self._ranks = seconds, ranks
        self.restart(step)

    def restart(self, step: int) -> None:
        """Begin the next interval after this step."""
        self._started, self._first, self._next = time.monotonic(), step, step + 1

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is due after this step. Collective at some steps."""
        if self._seconds is None or step < self._next:
            return False
        spent, done = time.monotonic() - self._started, max(step - self._first, 1)
        spent = float(self._ranks.on_first_rank(lambda: spent))
        left = self._seconds - spent
        if left > 0:
            ahead = int(left / 2 * done / max(spent, 1e-9)) if self._ranks.world > 1 else 1
            self._next = step + max(1, min(ahead, done))
        return left <= 0


@dataclass
class Chain:
    """The row files of a table: bytes of the oldest number, bytes of the newer ones, numbers."""

    oldest: int = 0
    newer: int = 0
    numbers: int = 0

    def begins_anew(self, changed: int) -> bool:
        """Whether all rows should be written, now that `changed` bytes of rows changed."""
        return not self.numbers or (
            changed > MOST_CHANGED * self.oldest
            or self.newer + changed > MOST_NEWER * self.oldest
            or (changed > 0 and self.numbers >= MOST_NUMBERS)
        )

    def add(self, written: int, *, whole: bool) -> None:
        """Count the row files of one more checkpoint."""
        if whole:
            self.oldest, self.newer, self.numbers = written, 0, int(written > 0)
        elif written:
            self.newer, self.numbers = self.newer + written, self.numbers + 1


@dataclass
class _Job:
    """A checkpoint on its way to the disk."""

    snapshot: Snapshot
    number: int
    rows: dict[str, RowSnapshot] = field(default_factory=dict)  # of the tables in row files
    removed: dict[str, torch.Tensor] = field(default_factory=dict)  # ids that lost their row
    anew: frozenset[str] = frozenset()  # tables that need no row file of the checkpoint before

    def pieces(self) -> Iterator[RowPiece]:
        """Yield all rows to write, each piece valid until the next."""
        for name, snapshot in self.rows.items():
            for keys_U, rows in snapshot.pieces(files.FILE_BYTES):
                yield RowPiece(name, keys_U, rows)
            yield RowPiece(name, self.removed.get(name, _NO_IDS))

    def close(self) -> None:
        """Let the tables go: nobody will read their rows any more."""
        for snapshot in self.rows.values():
            snapshot.close()


class CheckpointWriter:
    """The checkpoints of one session of a run. Collective to make with several ranks.

    `source` is the checkpoint that the tables were loaded from, if any.
    """

    def __init__(
        self,
        directory: Path,
        recommender: Recommender,
        ranks: Ranks = ALONE,
        source: Path | None = None,
    ) -> None:
        self.directory, self.recommender, self.ranks = directory, recommender, ranks
        tables = recommender.tables.tables
        self._source, self._number = source, 0
        self._chains: dict[str, Chain] = {}  # of the tables in row files
        if source is not None:
            names = [n for n in read_state(source).get("row_tables", ()) if n in tables]
            self._chains = {name: Chain() for name in names}
            sizes: dict[tuple[int, str], int] = {}  # by number and table
            for file in row_files(source, names):
                at, size = (file.number, file.table), file.path.stat().st_size
                sizes[at] = sizes.get(at, 0) + size
                self._number = max(self._number, file.number + 1)
            for (_, name), size in sorted(sizes.items()):
                chain = self._chains[name]
                chain.add(size, whole=not chain.numbers)
        for name in self._chains:
            tables[name].mark_saved()
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._error: BaseException | None = None
        self._own_ranks = _with_own_group(ranks)

    def save(
        self,
        step: int,
        optimizer: torch.optim.AdamW | None,
        state: dict[str, Any],
        *,
        kind: str = LAST,
        keep: int = 1,
        extra_files: Mapping[str, State] | None = None,
    ) -> None:
        """Take what the checkpoint of `step` needs; it is written behind the next steps.

        Waits while the checkpoint before the last is still being written. Collective.
        """
        self._wait_for_jobs(most=1)
        snapshot = take_snapshot(
            self.directory,
            step,
            self.recommender,
            optimizer,
            state,
            kind=kind,
            keep=keep,
            ranks=self.ranks,
            extra_files=extra_files,
            row_tables=self._chains,
        )
        job = _Job(snapshot, self._number)
        self._number += 1
        self._take_rows(job)
        with self._changed:
            self._jobs.append(job)
            if len(self._jobs) == 1:
                threading.Thread(target=self._write_jobs, name="checkpoints", daemon=True).start()

    def _take_rows(self, job: _Job) -> None:
        """Take snapshots of the tables, and count them to their chains. Collective."""
        names, tables = list(job.snapshot.row_tables), self.recommender.tables.tables
        writes = self.ranks.rank < self.ranks.shards  # replicas hold the same rows
        changed = [tables[n].num_updated * tables[n].row_bytes * writes for n in names]
        chains = [self._chains.setdefault(name, Chain()) for name in names]
        job.anew = frozenset(
            name
            for name, chain, size in zip(names, chains, self.ranks.sum(changed), strict=True)
            if chain.begins_anew(int(size))
        )
        most = _most_kept_bytes(self.recommender.recipe.tables.directory is not None)
        for name in names:
            table = tables[name]
            if not writes:
                table.mark_saved()
                continue
            if isinstance(table, HashedTable) and name not in job.anew:
                job.removed[name] = table.removed()
            job.rows[name] = table.snapshot(whole=name in job.anew, most_bytes=most)
        sizes = [job.rows[name].num_bytes if writes else 0 for name in names]
        for name, chain, size in zip(names, chains, self.ranks.sum(sizes), strict=True):
            chain.add(int(size), whole=name in job.anew)

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is still on its way to the disk."""
        return bool(self._jobs)

    def wait(self) -> None:
        """Wait until every checkpoint is on the disk; raise what kept one from it. Collective."""
        self._wait_for_jobs(most=0)

    def close(self, *, failed: bool = False) -> None:
        """Wait for the thread, though not for longer than `rank_timeout` where the run failed."""
        seconds = self.recommender.recipe.train.rank_timeout if failed else None
        with self._changed:
            self._changed.wait_for(lambda: not self._jobs, seconds)
        if self._own_ranks.everybody is not None and dist.is_initialized():
            with contextlib.suppress(Exception):  # a lost rank has closed it already
                dist.destroy_process_group(self._own_ranks.everybody.group)

    # -- between the loop and the thread --

    def _wait_for_jobs(self, most: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or len(self._jobs) <= most)
        if self._error is not None and not isinstance(self._error, Exception):
            raise self._error
        self.ranks.fail_together(self._error)

    def _write_jobs(self) -> None:
        """Write all jobs there are, in order: the thread."""
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while True:
            try:
                job = self._jobs[0]
                self._source = write_snapshot(
                    job.snapshot,
                    job.pieces(),
                    self._own_ranks,
                    number=job.number,
                    source=self._source,
                    anew=job.anew,
                )
            except BaseException as error:  # raised again by the loop
                with self._changed:
                    self._error = error
                    for each in self._jobs:
                        each.close()
                    self._jobs.clear()
                    self._changed.notify_all()
                return
            with self._changed:
                self._jobs.popleft()
                self._changed.notify_all()
                if not self._jobs:
                    return


def _with_own_group(ranks: Ranks) -> Ranks:
    """Return the same ranks with a process group for one more thread. Collective."""
    if ranks.everybody is None:
        return ranks
    group = dist.new_group(list(range(ranks.world)), timeout=timedelta(seconds=_WRITE_SECONDS))
    return replace(ranks, everybody=Communicator(group))


def _most_kept_bytes(on_disk: bool) -> int:
    """Return how many bytes of kept rows may wait: a quarter of what is free, less with disks."""
    if on_disk:
        return DISK_COPY_BYTES
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return LEAST_COPY_BYTES
    free = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    return max(LEAST_COPY_BYTES, free[0] // 4 if free else 0)
