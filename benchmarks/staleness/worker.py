"""A process that does runs of a study until none is left.

It is started as `python -m benchmarks.staleness.worker SESSION`, where SESSION is the JSON file its
parent wrote. Several single workers share the work by claiming runs; a group of ranks walks the
same list together. A worker ends when its parent has ended, and without a result for a run that was
stopped. Touch this when runs are shared in another way.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.staleness.cases import CASES, QUICK, open_store
from benchmarks.staleness.plan import Planned, plan
from benchmarks.staleness.single_run import Interrupted, perform
from slipstream.data.store import SequenceStore
from slipstream.files import read_json, write_json

STOPPED = 130  # exit code of a worker that was stopped


@dataclass(frozen=True)
class Session:
    """What a study passes to its workers."""

    cases: list[str]
    seeds: list[int]
    variants: list[str] | None
    data: str
    out: str
    scratch: str  # of this session alone
    parent: int
    ranks: int = 1

    def save(self, path: Path) -> None:
        write_json(path, asdict(self))

    def runs(self) -> tuple[list[Planned], dict[str, SequenceStore]]:
        """Return the plan and its stores; the same on every worker."""
        cases = [QUICK if name == QUICK.name else CASES[name] for name in self.cases]
        stores = {case.name: open_store(case, Path(self.data), Path(self.out)) for case in cases}
        digests = {name: store.digest for name, store in stores.items()}
        return plan(
            cases, digests, self.seeds, None if self.variants is None else tuple(self.variants)
        ), stores


def main(session_path: str, rank: int = 0) -> int:
    session = Session(**read_json(session_path))
    torch.set_num_threads(1)
    runs, stores = session.runs()
    mine = [run for run in runs if run.variant.ranks == session.ranks]
    with _together(session, rank):
        for run in mine:
            if not _parent_lives(session.parent):
                return STOPPED
            if not _claimed(run, session, rank):
                continue
            try:
                result = perform(
                    run, stores[run.case.name], Path(session.scratch) / run.name, first=rank == 0
                )
            except Interrupted:
                return STOPPED
            if result is not None:
                write_json(run.result_path(Path(session.out)), result)
    return 0


@contextlib.contextmanager
def _together(session: Session, rank: int) -> Iterator[None]:
    """Join the process group of the ranks through a file; does nothing for a single worker."""
    if session.ranks == 1:
        yield
        return
    meeting, timeout = f"file://{Path(session.scratch).resolve() / 'meeting'}", timedelta(hours=1)
    dist.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=session.ranks, timeout=timeout
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def _claimed(run: Planned, session: Session, rank: int) -> bool:
    """Claim a run: it is not done, and no other worker of this session has begun it."""
    if session.ranks > 1:
        mine = [run.result(Path(session.out)) is None if rank == 0 else None]
        dist.broadcast_object_list(mine, src=0)
        return bool(mine[0])
    if run.result(Path(session.out)) is not None:
        return False
    try:
        os.close(os.open(Path(session.scratch) / f"{run.name}.claimed", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _parent_lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1], int(sys.argv[2])))
    except KeyboardInterrupt:
        sys.exit(STOPPED)
