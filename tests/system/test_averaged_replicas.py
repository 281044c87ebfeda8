"""Averaged replicas train the same, whenever a run saves, evaluates or is stopped."""

from pathlib import Path

import torch

from slipstream.data.store import SequenceStore
from slipstream.training import loop, run
from slipstream.training.telemetry import read_metrics
from tests.support.ranks_fixtures import run_ranks
from tests.support.training_fixtures import same_tensors, saved_tensors, small_recipe, small_store

EVERY, STEPS = 4, 16
VARIANTS = {
    "plain": {},
    "saves": {"checkpoint_every": 3},
    "evaluates": {"evaluate_every": "5 steps"},
    "stopped": {},
}


def stop_once_at(step):
    """A stop asked of one rank after this step, in the first session only."""
    real, stops = loop.run_loop, iter((step,))

    def stopped(recipe, steps, loader, progress, hooks, ranks):
        at, on_step = next(stops, None), hooks.on_step
        hooks.on_step = lambda progress, batch: (
            on_step(progress, batch),
            hooks.stop.set() if progress.step == at and ranks.rank == 1 else None,
        )
        return real(recipe, steps, loader, progress, hooks, ranks)

    run.run_loop = stopped


def train_all(rank, world, place):
    """Train every variant; return whether each ends with the bits of the first, and its steps."""
    store, found, ends = SequenceStore.open(Path(place) / "store"), {}, []
    tables = {"optimizer": "rowwise_adagrad", "replicas": "averaged", "average_every": EVERY}
    for name, more in VARIANTS.items():
        options = {"max_steps": STEPS, "epochs": 99, "mesh": "2x1", "evaluate_every": 0, **more}
        recipe, out = small_recipe(tables=tables, train=options), Path(place) / name
        sessions = 1
        if name == "stopped":
            stop_once_at(5)
            sessions = 2
        for _ in range(sessions):
            done = run.train(recipe, store, out, quiet=True, dtype=torch.float64)
            ends.append([done.status, done.step])
        found[name] = saved_tensors(out)
    alike = [same_tensors(found["plain"], each) for each in found.values()]
    return [alike, ends]


def test_saves_evaluations_and_stops_wait_until_replicas_are_averaged(tmp_path):
    small_store(tmp_path / "store")
    for alike, ends in run_ranks(2, f"{__name__}:train_all", tmp_path, place=str(tmp_path)):
        assert alike == [True] * len(VARIANTS)
        # Asked to stop at step 6 at the latest, it stops with the average at step 8.
        assert ends[3:] == [["interrupted", 8], ["finished", STEPS]]
    records = read_metrics(tmp_path / "evaluates" / "metrics.jsonl")
    assert [each["step"] for each in records if "validation" in each] == [8, 12, 16]
