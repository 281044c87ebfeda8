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
from slipstream.training.checkpoint import BEST, save_checkpoint
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
        # Files that a schedule adds to checkpoints: name -> tensors.
        self.extra_files: Callable[[], dict[str, dict[str, torch.Tensor]]] = dict
        # What `train.schedule=auto` chose, for run.json, and how to write that file now.
        self.schedule: dict[str, Any] = {}
        self.write_run: Callable[[], object] = lambda: None
        self._figures: dict[str, Any] = {}
        self._tokens, self._flops = 0, 0
        self._started, self._first_step = time.perf_counter(), progress.step

    def hooks(
        self, evaluate: Callable[[], dict[str, float]] | None, stop: threading.Event
    ) -> Hooks:
        """Return what the loop calls."""
        return Hooks(evaluate, self.on_step, self.on_log, self.on_evaluation, self.save, stop)

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
        self._figures |= {**record, **reading}
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
            checkpoints = self.directory / "checkpoints"
            about = {"store": self.loader.state_dict()["store"]}
            save_checkpoint(
                checkpoints,
                progress.step,
                self.recommender,
                None,
                about,
                kind=BEST,
                ranks=self.ranks,
            )

    def save(self, progress: Progress) -> None:
        """Write a checkpoint. Collective."""
        state = {"progress": progress.to_json(), "sampler": self.loader.state_dict()}
        save_checkpoint(
            self.directory / "checkpoints",
            progress.step,
            self.recommender,
            self.optimizer,
            state,
            keep=self.config.keep_last,
            ranks=self.ranks,
            extra_files=self.extra_files(),
        )

    def _append(self, record: dict[str, Any]) -> None:
        if self.metrics is not None:
            self.metrics.append(record)

    def close(self) -> None:
        """Close all files."""
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
