"""One run of a study: trained to the end, evaluated once on the test behaviours, its bits digested.

Touch this when a result should hold more.
"""

import math
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.staleness.bits import digest_in_memory, digest_of_checkpoint
from benchmarks.staleness.cut_loop import train_plain_cut
from benchmarks.staleness.plan import Planned
from slipstream.data.store import SequenceStore
from slipstream.errors import SlipstreamError
from slipstream.training.checkpoint import latest
from slipstream.training.evaluation import evaluate
from slipstream.training.recipe import Recipe
from slipstream.training.recommender import Recommender
from slipstream.training.run import open_run, train
from slipstream.training.telemetry import read_metrics

TAIL = 0.2  # the training loss is averaged over this last part of the steps


class Interrupted(Exception):
    """The run was stopped; it has no result."""


def perform(
    planned: Planned, store: SequenceStore, scratch: Path, *, first: bool = True
) -> dict[str, Any] | None:
    """Train and evaluate; all ranks call this, and only the first one gets a result.

    A training whose loss becomes infinite has a result too: that it failed, and why. `scratch` must
    not hold an earlier attempt, because after a resume the rows of a stale schedule are fresher.
    """
    recipe, started, cpu = planned.recipe(), time.perf_counter(), time.process_time()
    try:
        if planned.variant.plain_cut:
            torch.set_num_threads(recipe.train.threads or torch.get_num_threads())
            recommender, optimizer, losses = train_plain_cut(recipe, store)
            bits = digest_in_memory(recommender, optimizer)
        else:
            if train(recipe, store, scratch, quiet=True).status != "finished":
                raise Interrupted
            if not first:
                return None
            recommender, losses, bits = _open_finished(scratch, store)
    except SlipstreamError as error:
        if "the loss became" not in str(error):
            raise
        return _result(planned, {"failed": str(error)}, started, cpu) if first else None
    return _result(planned, _evaluated(recommender, losses, bits, store, recipe), started, cpu)


def _open_finished(directory: Path, store: SequenceStore) -> tuple[Recommender, list[float], str]:
    """Open what a finished run left, with the loss of every step, and remove its directory."""
    _, _, recommender = open_run(directory, store, which="last")
    losses = [
        record["loss"] for record in read_metrics(directory / "metrics.jsonl") if "loss" in record
    ]
    newest = latest(directory / "checkpoints")
    assert newest is not None
    bits = digest_of_checkpoint(newest, recommender)
    shutil.rmtree(directory)
    return recommender, losses, bits


def _evaluated(
    recommender: Recommender, losses: list[float], bits: str, store: SequenceStore, recipe: Recipe
) -> dict[str, Any]:
    tail = losses[-max(1, int(TAIL * len(losses))) :]
    try:
        figures = evaluate(recommender, store, recipe, "test")
    except ValueError as error:  # scores that are not finite
        return {"failed": str(error), "steps": len(losses)}
    return {
        "figures": {**figures, "loss": math.fsum(tail) / len(tail)},
        "steps": len(losses),
        "bits": bits,
    }


def _result(planned: Planned, found: dict[str, Any], started: float, cpu: float) -> dict[str, Any]:
    about = {
        "case": planned.case.name,
        "variant": planned.variant.name,
        "seed": planned.seed,
        "digest": planned.digest(),
    }
    return {
        **about,
        **found,
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - cpu,
    }
