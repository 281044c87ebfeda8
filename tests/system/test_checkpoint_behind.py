"""Checkpoints written behind the steps survive SIGKILL, Ctrl-C and another number of ranks."""

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from slipstream.data.store import SequenceStore
from slipstream.training import checkpoint, checkpoint_writer, row_files
from slipstream.training.run import open_run, train
from tests.support.ranks_fixtures import run_ranks
from tests.support.training_fixtures import same_tensors, saved_tensors, small_recipe, small_store

KINDS = {
    "stale": ({}, {"schedule": "semi_async"}),
    "hashed": ({"tier": "hashed", "admit_after": 2, "max_rows": 160}, {"schedule": "synchronous"}),
    "disk": ({"tier": "disk", "cache_bytes": 1 << 16}, {"schedule": "nested", "micro_batches": 2}),
}


def recipe_of(kind, place, steps, **options):
    tables, train_options = KINDS[kind]
    if tables.get("tier") == "disk":
        tables = tables | {"directory": f"{place}-rows"}
    return small_recipe(
        tables=tables,
        train={"max_steps": steps, "epochs": 99, "checkpoint_every": 1, "threads": 1}
        | train_options
        | options,
    )


def slow_writes(seconds):
    """Every row file takes so long that steps overtake it."""
    write = row_files.write_row_file
    row_files.write_row_file = lambda *given: (time.sleep(seconds), write(*given))[1]


def end_at(rank, step, deadly):
    """Rank `rank` is killed by SIGKILL once that step was saved, while it is being written."""
    from slipstream.training.checkpoint_writer import CheckpointWriter

    save = CheckpointWriter.save

    def save_and_die(self, number, *given, **more):
        save(self, number, *given, **more)
        if number == step and self.ranks.rank == rank:
            deadly()

    CheckpointWriter.save = save_and_die


def sessions(rank, world, place, kind):
    """Train in two sessions; the first one's checkpoints are written late."""
    store, run_dir = SequenceStore.open(Path(place) / "store"), Path(place) / kind
    row_files.FILE_BYTES = 1 << 11
    checkpoint_writer.MOST_CHANGED, checkpoint_writer.MOST_NEWER = 1e9, 4.0
    slow_writes(0.005 * (1 + rank))
    for steps in (7, 12):
        train(recipe_of(kind, run_dir, steps), store, run_dir, quiet=True)
    whole = Path(place) / f"{kind} whole"
    train(recipe_of(kind, whole, 12, checkpoint_every=None), store, whole, quiet=True)
    return same_tensors(saved_tensors(run_dir), saved_tensors(whole))


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_resume_from_a_chain_bit_for_bit(tmp_path, kind):
    small_store(tmp_path / "store", users=40, items=300)
    answers = run_ranks(
        2, f"{__name__}:sessions", tmp_path / "ranks", place=str(tmp_path), kind=kind
    )
    assert answers == [True, True]
    newest = checkpoint.latest(tmp_path / kind / "checkpoints")
    numbers = {file.number for file in checkpoint.row_files(newest, ["item"])}
    assert len(numbers) > 1 and min(numbers) > 0  # a chain, and not the first one
    both = [open_run(tmp_path / name, which="last")[2] for name in (kind, f"{kind} whole")]
    assert torch.equal(*(each.catalogue_ND() for each in both))  # on one rank


def in_child(work) -> int:
    """Run `work` in a forked process; return how it ended."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1]


def cut_session(place, how):
    store, run_dir = SequenceStore.open(place / "store"), place / "cut"
    checkpoint.WHOLE_BYTES = 0
    slow_writes(0.2)
    number = signal.SIGKILL if how == "killed" else signal.SIGINT

    def end_while_writing():
        while not list((run_dir / "checkpoints").glob(".step-*")):
            time.sleep(0.001)
        os.kill(os.getpid(), number)

    end_at(0, 5, end_while_writing)
    with contextlib.suppress(KeyboardInterrupt):
        train(recipe_of("hashed", run_dir, 9), store, run_dir, quiet=True)


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_an_end_while_a_checkpoint_is_written(tmp_path, how, monkeypatch):
    store = small_store(tmp_path / "store", users=40, items=300)
    ended = in_child(lambda: cut_session(tmp_path, how))
    places = tmp_path / "cut" / "checkpoints"
    newest = checkpoint.latest(places)
    if how == "killed":  # its directory was begun and has no name yet
        assert os.WTERMSIG(ended) == signal.SIGKILL and list(places.glob(".step-*"))
        assert newest is None or newest.name < "step-00000005"
    else:  # Ctrl-C waits for what is being written
        assert ended == 0 and newest.name == "step-00000006" and not list(places.glob(".*"))
    monkeypatch.setattr(checkpoint, "WHOLE_BYTES", 0)
    for name in ("cut", "whole"):
        recipe = recipe_of("hashed", tmp_path / name, 9)
        train(recipe, store, tmp_path / name, quiet=True)
    assert same_tensors(saved_tensors(tmp_path / "cut"), saved_tensors(tmp_path / "whole"))
    assert not list(places.glob(".*"))
