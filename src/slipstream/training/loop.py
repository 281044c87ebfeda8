"""The plain synchronous loop: gather, forward, backward, apply, step. Every other schedule is held
against it.

`train_step` is the oracle; `run_loop` adds only what must happen between steps: evaluation at the
end of an epoch, early stopping, checkpoints, and a clean end when asked to stop.
"""

import contextlib
import math
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch

from slipstream.data.batch import JaggedBatch
from slipstream.data.sampler import TrainingSampler
from slipstream.errors import SlipstreamError, did_you_mean
from slipstream.training.optimizers import schedule_factor, step_dense
from slipstream.training.ranks import ALONE, Ranks
from slipstream.training.recipe import Recipe
from slipstream.training.recommender import Recommender


def train_step(
    recommender: Recommender,
    optimizer: torch.optim.AdamW,
    batch: JaggedBatch,
    step: int,
    total_steps: int,
    ranks: Ranks = ALONE,
) -> tuple[float, int]:
    """One step (counted from 0), in place: this rank's summed loss before it, and the supervised
    tokens of all ranks.
    """
    recipe = recommender.recipe
    factor = schedule_factor(recipe.optimizer, step, total_steps)
    gathered = recommender.gather(batch, step)
    count = int(ranks.sum([gathered.supervised_S.numel()])[0])  # of all ranks: the one normaliser
    loss, _ = recommender.loss_sum(batch, step, gathered)
    (loss / max(count, 1)).backward()
    recommender.apply(gathered, recipe.tables.lr * factor)
    ranks.sum_gradients_(recommender.model)
    step_dense(
        optimizer, recommender.model, recipe.optimizer.lr * factor, recipe.optimizer.clip_norm
    )
    return float(loss.detach()), count


@dataclass(frozen=True)
class Stepped:
    """A step that was done."""

    batch: JaggedBatch
    loss: float  # summed over all ranks
    count: int  # supervised tokens of all ranks
    asked_to_stop: bool  # on any rank


class Steps(Protocol):
    """Whoever does the steps of a run: the plain loop, or a schedule."""

    def next(self, step: int) -> Stepped | None:
        """Do step `step`; None when all ranks were asked to stop before it."""
        ...

    def settled(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the tables hold every update and may be read and saved."""
        ...

    def figures(self) -> dict[str, float]:
        """What to say about the steps since the last call."""
        ...


@dataclass(frozen=True)
class PlainSteps:
    """One step after the other: the oracle of every schedule."""

    recommender: Recommender
    optimizer: torch.optim.AdamW
    sampler: TrainingSampler
    ranks: Ranks
    stop: threading.Event

    def next(self, step: int) -> Stepped | None:
        batch = self.sampler.next_batch()
        steps = total_steps(self.recommender.recipe, self.sampler.steps_per_epoch)
        loss, count = train_step(self.recommender, self.optimizer, batch, step, steps, self.ranks)
        loss, asked_to_stop = agree(self.ranks, step, loss, self.stop.is_set())
        return Stepped(batch, loss, count, asked_to_stop)

    def settled(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def figures(self) -> dict[str, float]:
        return {}


@dataclass
class Progress:
    """Where a run stands; saved with every checkpoint."""

    step: int = 0  # steps done
    epochs_done: int = 0
    epoch_step: int = 0  # steps done in the running epoch
    loss_sum: float = 0.0  # since the last line of metrics
    loss_count: int = 0
    best_value: float | None = None
    best_step: int | None = None
    worse_evaluations: int = 0  # in a row
    metrics: dict[str, float] = field(default_factory=dict)  # of the last evaluation
    best_metrics: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Hooks:
    """What the run around the loop does with its events."""

    evaluate: Callable[[], dict[str, float]] | None
    on_step: Callable[[Progress, JaggedBatch], None]
    on_log: Callable[[Progress, dict[str, Any]], None]
    on_evaluation: Callable[[Progress, bool], None]
    save: Callable[[Progress], None]
    stop: threading.Event


def total_steps(recipe: Recipe, steps_per_epoch: int) -> int:
    """Steps a run takes when nothing stops it early (an estimate where batches are cut by token
    budget).
    """
    by_epochs = recipe.train.epochs * steps_per_epoch
    return by_epochs if recipe.train.max_steps is None else min(by_epochs, recipe.train.max_steps)


def run_loop(
    recommender: Recommender,
    optimizer: torch.optim.AdamW,
    sampler: TrainingSampler,
    progress: Progress,
    hooks: Hooks,
    ranks: Ranks = ALONE,
    doing: Steps | None = None,
) -> str:
    """Train from where `progress` stands; returns `finished`, `stopped early` or `interrupted`.
    Every way out has saved.

    All ranks decide alike: each step ends with one sum of what they saw, so that a stop asked of
    one rank stops all after it.
    """
    recipe = recommender.recipe
    steps = total_steps(recipe, sampler.steps_per_epoch)
    doing = doing or PlainSteps(recommender, optimizer, sampler, ranks, hooks.stop)
    while not _done(recipe, progress):
        if _patience_is_over(recipe, progress):
            return "stopped early"
        if (done := doing.next(progress.step)) is None:
            with doing.settled():
                hooks.save(progress)
            return "interrupted"
        asked_to_stop = done.asked_to_stop
        if not math.isfinite(done.loss):
            raise SlipstreamError(
                f"the loss became {done.loss} at step {progress.step + 1}; "
                "lower optimizer.lr or tables.lr, or set optimizer.clip_norm"
            )
        epoch_ended = _advance(progress, sampler, done.loss, done.count)
        hooks.on_step(progress, done.batch)
        if progress.step % recipe.train.log_every == 0:
            lr = recipe.optimizer.lr * schedule_factor(recipe.optimizer, progress.step - 1, steps)
            hooks.on_log(
                progress,
                {
                    "loss": progress.loss_sum / max(progress.loss_count, 1),
                    "lr": lr,
                    **doing.figures(),
                },
            )
            progress.loss_sum, progress.loss_count = 0.0, 0
        last, evaluated = _done(recipe, progress), False
        if hooks.evaluate is not None and _evaluation_is_due(recipe, progress, epoch_ended, last):
            with doing.settled():
                hooks.on_evaluation(progress, _judge(recipe, progress, hooks.evaluate()))
            evaluated = True
            asked_to_stop = ranks.sum([float(hooks.stop.is_set())])[0] > 0
        stopping = asked_to_stop and not last
        if evaluated or last or stopping or progress.step % recipe.train.checkpoint_every == 0:
            with doing.settled():
                hooks.save(progress)
        if stopping:
            return "interrupted"
    return "finished"


def agree(ranks: Ranks, step: int, loss: float, stop: bool) -> tuple[float, bool]:
    """The loss of all ranks, and whether any of them was asked to stop. Ranks that stand at
    different steps are a bug of ours.
    """
    total, stopping, steps = ranks.sum([loss, float(stop), float(step)])
    if steps != ranks.world * step:
        raise RuntimeError(f"rank {ranks.rank} stands at step {step}, but not all ranks do")
    return total, stopping > 0


def _advance(progress: Progress, sampler: TrainingSampler, loss: float, count: int) -> bool:
    """Count one finished step; says whether it ended an epoch."""
    progress.step += 1
    progress.epoch_step += 1
    progress.loss_sum += loss
    progress.loss_count += count
    ended = sampler.at_epoch_end
    if ended:
        progress.epochs_done, progress.epoch_step = progress.epochs_done + 1, 0
    return ended


def _done(recipe: Recipe, progress: Progress) -> bool:
    by_steps = recipe.train.max_steps is not None and progress.step >= recipe.train.max_steps
    return by_steps or progress.epochs_done >= recipe.train.epochs


def _patience_is_over(recipe: Recipe, progress: Progress) -> bool:
    return recipe.train.patience is not None and progress.worse_evaluations >= recipe.train.patience


def _evaluation_is_due(recipe: Recipe, progress: Progress, epoch_ended: bool, last: bool) -> bool:
    every = recipe.train.evaluate_every
    return every > 0 and (last or (epoch_ended and progress.epochs_done % every == 0))


def _judge(recipe: Recipe, progress: Progress, metrics: dict[str, float]) -> bool:
    """Note an evaluation; says whether it is the best so far."""
    value = figure_of_merit(recipe, metrics)
    progress.metrics = metrics
    if progress.best_value is not None and not value > progress.best_value:
        progress.worse_evaluations += 1
        return False
    progress.best_value, progress.best_step, progress.best_metrics, progress.worse_evaluations = (
        value,
        progress.step,
        metrics,
        0,
    )
    return True


def figure_of_merit(recipe: Recipe, metrics: dict[str, float]) -> float:
    """The one number early stopping maximises: the recipe's metric, or HR@10+NDCG@10, or the sum of
    the ranking tasks' AUCs.
    """
    if recipe.train.metric is None and recipe.task == "ranking":
        names = [name for name in metrics if "AUC" in name and "GAUC" not in name] or ["AUC"]
    else:
        names = [name.strip() for name in (recipe.train.metric or "HR@10+NDCG@10").split("+")]
    for name in names:
        if name not in metrics:
            raise SlipstreamError(
                f"evaluation gives no figure '{name}' to choose the best epoch "
                f"by{did_you_mean(name, metrics)}"
            )
    return sum(metrics[name] for name in names)
