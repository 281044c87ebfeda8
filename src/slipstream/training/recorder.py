"""Keeps the record of a run at the loop's hooks: checkpoints, metrics, events, the progress line.

Touch this when a run should write or show something more.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from slipstream.data.batch import JaggedBatch
from slipstream.data.loader import PrefetchingLoader
from slipstream.models.flops import training_flops
from slipstream.training.checkpoint import BEST
from slipstream.training.checkpoint_writer import CheckpointClock, CheckpointWriter
from slipstream.training.loop import Hooks, Progress, total_steps
from slipstream.training.popularity import BASELINE
from slipstream.training.ranks import ALONE, Ranks
from slipstream.training.recommender import Recommender
from slipstream.training.step_cost import flop_options
from slipstream.training.telemetry import (
    Meter,
    MetricsFile,
    ProgressLine,
    TensorBoard,
    describe,
    measure_peak_flops,
)


def step_flops(recommender: Recommender, batch: JaggedBatch) -> int:
    """Count the FLOPs of one training step over this batch, as docs and benchmarks do."""
    options = flop_options(recommender.recipe, recommender.features.num_items)
    return training_flops(recommender.recipe.model, batch.lengths_B.tolist(), **options)


class Recorder:
    """One session of one run. Every rank has one and calls it alike; rank 0's writes and prints."""

    def __init__(
        self,
        directory: Path,
        recommender: Recommender,
        optimizer: torch.optim.AdamW,
        loader: PrefetchingLoader,
        progress: Progress,
        *,
        quiet: bool,
        ranks: Ranks = ALONE,
        resumed_from: Path | None = None,
    ) -> None:
        self.directory, self.progress, self.ranks = directory, progress, ranks
        self.recommender, self.optimizer, self.loader = recommender, optimizer, loader
        self.config = recommender.recipe.train
        self.metrics = (
            MetricsFile(directory / "metrics.jsonl", progress.step) if ranks.first else None
        )
        self.board = TensorBoard(
            directory / "tensorboard", progress.step, self.config.tensorboard and ranks.first
        )
        self.line = ProgressLine(self.config.epochs, quiet=quiet or not ranks.first)
        self.meter = Meter(ranks.sum([measure_peak_flops()])[0])
        self.checkpoints = CheckpointWriter(
            directory / "checkpoints", recommender, ranks, resumed_from
        )
        self.clock = CheckpointClock(self.config.checkpoint_seconds, progress.step, ranks)
        # Files that a schedule adds to checkpoints: name -> tensors.
        self.extra_files: Callable[[], dict[str, dict[str, torch.Tensor]]] = dict
        # What `train.schedule=auto` chose, for run.json, and how to write that file now.
        self.schedule: dict[str, Any] = {}
        self.write_run: Callable[[], object] = lambda: None
        self.logged: dict[str, Any] = {}  # the figures of the last line of metrics
        self._figures: dict[str, Any] = {}
        self._tokens, self._flops = 0, 0
        self._started, self._first_step = time.perf_counter(), progress.step

    def hooks(
        self, evaluate: Callable[[], dict[str, float]] | None, stop: threading.Event
    ) -> Hooks:
        """Return what the loop calls."""
        return Hooks(
            evaluate,
            self.on_step,
            self.on_log,
            self.on_evaluation,
            self.checkpoint_is_due,
            self.save,
            stop,
            self.replicas_are_equal,
        )

    def on_step(self, progress: Progress, batch: JaggedBatch) -> None:
        """Count a finished step's tokens and FLOPs."""
        self._tokens += batch.num_tokens
        self._flops += step_flops(self.recommender, batch)

    def on_log(self, progress: Progress, record: dict[str, Any]) -> None:
        """Write a line of metrics. Collective."""
        tokens, flops = self.ranks.sum([self._tokens, self._flops])
        self._tokens, self._flops = 0, 0
        self.meter.add(int(tokens), flops)
        reading = self.meter.read()
        self._append({"step": progress.step, "epoch": progress.epochs_done, **record, **reading})
        self.board.scalars("train", progress.step, {**record, **reading})
        self.logged = {**record, **reading}
        self._figures |= self.logged
        self._show(progress)

    def on_evaluation(self, progress: Progress, is_best: bool) -> None:
        """Write an evaluation, and keep the weights if they are the best. Collective."""
        self._append(
            {
                "step": progress.step,
                "epoch": progress.epochs_done,
                "validation": progress.metrics,
                "best": is_best,
            }
        )
        model_only = {
            name: value
            for name, value in progress.metrics.items()
            if not name.startswith(BASELINE)  # the same at every step
        }
        self.board.scalars("validation", progress.step, model_only)
        self._figures |= {
            name: value for name, value in progress.metrics.items() if name == "HR@10"
        }
        self._show(progress, now=True)
        if is_best:
            about = {"store": self.loader.state_dict()["store"]}
            self.checkpoints.save(progress.step, None, about, kind=BEST)

    def checkpoint_is_due(self, progress: Progress) -> bool:
        """Whether a checkpoint is due by time. Collective at some steps."""
        return self.clock.is_due(progress.step)

    def replicas_are_equal(self) -> bool:
        """Whether all replicas hold the same rows now."""
        replicas = self.recommender.tables.replicas
        return replicas is None or replicas.are_equal

    def save(self, progress: Progress) -> None:
        """Save a checkpoint; it is written behind the next steps. Collective."""
        state = {"progress": progress.to_json(), "sampler": self.loader.state_dict()}
        self.checkpoints.save(
            progress.step,
            self.optimizer,
            state,
            keep=self.config.keep_last,
            extra_files=self.extra_files(),
        )
        self.clock.restart(progress.step)

    def _append(self, record: dict[str, Any]) -> None:
        if self.metrics is not None:
            self.metrics.append(record)

    def close(self, *, failed: bool = False) -> None:
        """Close all files, once the last checkpoint is written."""
        self.checkpoints.close(failed=failed)
        self.line.close()
        if self.metrics is not None:
            self.metrics.close()
        self.board.close()

    def _show(self, progress: Progress, *, now: bool = False) -> None:
        if "loss" not in self._figures:
            return
        done = progress.step - self._first_step
        total = total_steps(self.recommender.recipe, self.loader.steps_per_epoch)
        left = (
            (time.perf_counter() - self._started) / done * max(total - progress.step, 0)
            if done
            else None
        )
        steps = self.loader.steps_per_epoch
        self.line.show(
            progress.epochs_done + 1,
            progress.epoch_step,
            steps,
            describe(self._figures, left),
            now=now,
        )
