"""Keeps the record of a run: answers the loop's hooks with checkpoints, metrics, events and the progress line."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from slipstream.data.batch import JaggedBatch
from slipstream.data.sampler import TrainingSampler
from slipstream.models.flops import training_flops
from slipstream.training.checkpoint import BEST, save_checkpoint
from slipstream.training.loop import Hooks, Progress, total_steps
from slipstream.training.recommender import Recommender
from slipstream.training.telemetry import Meter, MetricsFile, ProgressLine, TensorBoard, describe, measure_peak_flops


def step_flops(recommender: Recommender, batch: JaggedBatch) -> int:
    """What one training step over this batch is worth, by the account of docs and benchmarks."""
    recipe = recommender.recipe
    negatives = recommender.features.num_items - 1 if recipe.loss.kind == "full_softmax" else recipe.loss.negatives
    return training_flops(
        recipe.model,
        batch.lengths_B.tolist(),
        task=recipe.task,
        negatives=negatives,
        num_tasks=len(recipe.tasks),
        user_tokens=len(recipe.user_features),
    )


class Recorder:
    """One session of one run."""

    def __init__(
        self,
        directory: Path,
        recommender: Recommender,
        optimizer: torch.optim.AdamW,
        sampler: TrainingSampler,
        progress: Progress,
        *,
        quiet: bool,
    ) -> None:
        self.directory, self.progress = directory, progress
        self.recommender, self.optimizer, self.sampler = recommender, optimizer, sampler
        self.config = recommender.recipe.train
        self.metrics = MetricsFile(directory / "metrics.jsonl", progress.step)
        self.board = TensorBoard(directory / "tensorboard", progress.step, self.config.tensorboard)
        self.line = ProgressLine(self.config.epochs, quiet=quiet)
        self.meter = Meter(measure_peak_flops())
        self._figures: dict[str, Any] = {}
        self._started, self._first_step = time.perf_counter(), progress.step

    def hooks(self, judge: Callable[[], dict[str, float]] | None, stop: threading.Event) -> Hooks:
        return Hooks(judge, self.on_step, self.on_log, self.on_evaluation, self.save, stop)

    def on_step(self, progress: Progress, batch: JaggedBatch) -> None:
        self.meter.add(batch.num_tokens, step_flops(self.recommender, batch))

    def on_log(self, progress: Progress, record: dict[str, Any]) -> None:
        reading = self.meter.read()
        self.metrics.append({"step": progress.step, "epoch": progress.epochs_done, **record, **reading})
        self.board.scalars("train", progress.step, {**record, **reading})
        self._figures |= {**record, **reading}
        self._show(progress)

    def on_evaluation(self, progress: Progress, is_best: bool) -> None:
        self.metrics.append({"step": progress.step, "epoch": progress.epochs_done, "validation": progress.metrics, "best": is_best})
        self.board.scalars("validation", progress.step, progress.metrics)
        self._figures |= {name: value for name, value in progress.metrics.items() if name == "HR@10"}
        self._show(progress, now=True)
        if is_best:
            save_checkpoint(self.directory / "checkpoints", progress.step, self.recommender, None, {}, kind=BEST)

    def save(self, progress: Progress) -> None:
        state = {"progress": progress.to_json(), "sampler": self.sampler.state_dict()}
        save_checkpoint(
            self.directory / "checkpoints", progress.step, self.recommender, self.optimizer, state, keep=self.config.keep_last
        )

    def close(self) -> None:
        self.line.close()
        self.metrics.close()
        self.board.close()

    def _show(self, progress: Progress, *, now: bool = False) -> None:
        if "loss" not in self._figures:
            return
        done = progress.step - self._first_step
        total = total_steps(self.recommender.recipe, self.sampler.steps_per_epoch)
        left = (time.perf_counter() - self._started) / done * max(total - progress.step, 0) if done else None
        steps = self.sampler.steps_per_epoch
        self.line.show(progress.epochs_done + 1, progress.epoch_step, steps, describe(self._figures, left), now=now)
