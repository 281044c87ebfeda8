"""One rank of the benchmark of automatic schedules: one whole training run of one variant.

Started by `benchmarks.auto_schedule.bench`, once per run; rank 0 prints one JSON object. Touch this
when a run needs another set-up.
"""

import functools
import json
import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.auto_schedule.turns import TakesTurns
from slipstream.data.store import SequenceStore
from slipstream.tables.factory import make_table
from slipstream.training import recommender
from slipstream.training.ranks import ALONE
from slipstream.training.recipe import Recipe
from slipstream.training.run import make_sampler, train
from slipstream.training.telemetry import read_metrics

# Later, rounding has grown through training itself: fp32 runs that cut batches differ by per cents.
COMPARED_STEPS = 100


@dataclass(frozen=True)
class Job:
    """A run: what trains where, and how slow its disk is."""

    store: str
    ranks: int
    tier: str
    schedule: str = "synchronous"
    micro_batches: int = 8
    steps: int = 400
    steps_a_turn: int = 100
    users: int = 16  # a step and rank
    length: int = 256
    dim: int = 64
    cache_rows: int = 1024
    read_rate: float | None = None  # rows a second and rank
    seconds_allowed: int = 600

    def recipe(self, scratch: Path) -> Recipe:
        """Return the recipe of the run."""
        tables: dict[str, Any] = {"optimizer": "rowwise_adagrad", "lr": 2e-2, "tier": self.tier}
        if self.tier == "disk":
            row_bytes = 4 * (self.dim + 1) + 8
            tables |= {"directory": str(scratch / "tables")}
            tables |= {"cache_bytes": max(self.cache_rows * row_bytes, 1 << 16)}
        model = {"kind": "hstu", "dim": self.dim, "blocks": 1, "heads": 2, "max_len": self.length}
        model |= {"dropout": 0.0, "input_dropout": 0.0, "position_embedding": False}
        return Recipe.model_validate(
            {
                "name": "auto_schedule",
                "model": model,
                "sampler": {"max_len": self.length, "batch_size": self.users * self.ranks},
                "loss": {"kind": "shared_softmax", "negatives": 32},
                "tables": tables,
                "train": {
                    "epochs": 10_000,
                    "max_steps": self.steps,
                    "evaluate_every": 0,
                    "checkpoint_every": 10_000_000,
                    "log_every": 1,
                    "tensorboard": False,
                    "threads": 1,
                    "schedule": self.schedule,
                    "micro_batches": self.micro_batches,
                },
            }
        )


def distinct_rows(job: Job, scratch: Path, steps: int = 8) -> float:
    """Return the distinct items of a global batch, on average over the first steps."""
    sampler = make_sampler(job.recipe(scratch), SequenceStore.open(job.store), ALONE)
    batches = [sampler.next_batch() for _ in range(steps)]
    return float(np.mean([batch.items_T.unique().numel() for batch in batches]))


def main(rank: int, scratch: Path, job: Job) -> None:
    """Run one rank; rank 0 prints what the run took and chose."""
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cpus) >= job.ranks:
        os.sched_setaffinity(0, {cpus[rank % len(cpus)]})
    if job.read_rate is not None:  # a disk slower than this machine's
        paced = functools.partial(make_table, read_rate=job.read_rate)
        recommender.make_table = paced
    torch.set_num_threads(1)
    if job.ranks > 1:
        meeting, patience = f"file://{scratch / 'meeting'}", timedelta(seconds=job.seconds_allowed)
        dist.init_process_group(
            "gloo", init_method=meeting, rank=rank, world_size=job.ranks, timeout=patience
        )
    try:
        out, turns = scratch / "run", TakesTurns(scratch, job.steps_a_turn)
        store = SequenceStore.open(job.store)
        result = train(job.recipe(scratch), store, out, quiet=True, callbacks=[turns])
        turns.end_turn()
        if rank == 0:
            losses = [each["loss"] for each in read_metrics(out / "metrics.jsonl")]
            recorded = json.loads((out / "run.json").read_text())
            found: dict[str, Any] = {"step_seconds": turns.seconds / result.step}
            found["turns"] = turns.blocks
            found["loss"] = float(np.mean(losses[:COMPARED_STEPS]))
            found["phases"] = recorded.get("schedule", {}).get("phases", [])
            found["distinct_rows"] = distinct_rows(job, scratch)
            print(json.dumps(found))
    finally:
        if job.ranks > 1:
            dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), Job(**json.loads(sys.argv[3])))
