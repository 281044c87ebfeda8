"""The plain synchronous loop: plan, read, loss, backward, update. It is every schedule's oracle.

`train_step` is the oracle. `run_loop` adds what must happen between steps: evaluation after
epochs or steps, early stopping, checkpoints, and an orderly end when asked to stop. Touch this when
a step or the time between steps changes.
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch

from slipstream.data.batch import JaggedBatch
from slipstream.data.loader import PrefetchingLoader
from slipstream.errors import SlipstreamError, did_you_mean
from slipstream.pipeline.clustering import deal_samples
from slipstream.pipeline.work import StepResult
from slipstream.training.optimizers import schedule_factor, step_dense
from slipstream.training.ranks import ALONE, Ranks
from slipstream.training.recipe import Recipe
from slipstream.training.recommender import Recommender
from slipstream.training.step import StepInputs


def train_step(
    recommender: Recommender,
    optimizer: torch.optim.AdamW,
    batch: JaggedBatch,
    step: int,
    total_steps: int,
    ranks: Ranks = ALONE,
    *,
    stop: bool = False,
) -> StepResult:
    """Train one step in place. Steps count from 0; `stop`: this rank was asked to stop."""
    recipe = recommender.recipe
    factor = schedule_factor(recipe.optimizer, step, total_steps)
    begin = time.perf_counter()
    plans = [recommender.plan_step(part, step) for part in _parts(recipe, batch)]
    count = int(ranks.sum([sum(plan.count for plan in plans)])[0])  # the one normaliser
    lookup_seconds, parts, loss = time.perf_counter() - begin, [], torch.zeros(())
    for plan in plans:
        begin = time.perf_counter()
        parts.append(recommender.read(plan))
        lookup_seconds += time.perf_counter() - begin
        loss = loss + _backward(recommender, parts[-1], count, alone=len(plans) == 1)
    begin = time.perf_counter()
    recommender.update(parts, recipe.tables.lr * factor)
    lookup_seconds += time.perf_counter() - begin
    ranks.sum_gradients_(recommender.model)
    step_dense(
        optimizer, recommender.model, recipe.optimizer.lr * factor, recipe.optimizer.clip_norm
    )
    loss_sum, stop = agree(ranks, step, float(loss), stop)
    return StepResult(step, batch, loss_sum, count, stop, lookup_seconds)


def _parts(recipe: Recipe, batch: JaggedBatch) -> list[JaggedBatch]:
    """Cut a step's batch into the parts that are computed one after the other."""
    if recipe.train.accumulate == 1:
        return [batch]
    return [batch.take(users) for users in deal_samples(batch.offsets_B1, recipe.train.accumulate)]


def _backward(
    recommender: Recommender, inputs: StepInputs, count: int, *, alone: bool
) -> torch.Tensor:
    """Add the gradients of one part of a step; return its loss. Other ranks may have more parts."""
    if not alone and not inputs.batch.num_users:
        if recommender.fetch is not None:
            recommender.fetch.take_part()
        return torch.zeros(())
    loss = recommender.loss(inputs)
    (loss / max(count, 1)).backward()
    return loss.detach().cpu()


def agree(ranks: Ranks, step: int, loss: float, stop: bool) -> tuple[float, bool]:
    """Return the loss of all ranks, and whether any rank was asked to stop. Collective."""
    total, stopping, steps = ranks.sum([loss, float(stop), float(step)])
    if steps != ranks.world * step:
        raise RuntimeError(f"rank {ranks.rank} stands at step {step}, but not all ranks do")
    return total, stopping > 0


class Steps(Protocol):
    """What makes the steps of a run: the plain loop, or a schedule."""

    def next(self, step: int) -> StepResult | None:
        """Do step `step`; None when all ranks were asked to stop before it."""
        ...

    def settled(self) -> contextlib.AbstractContextManager[None]:
        """Hold the tables still: inside, they contain every update and may be read and saved."""
        ...

    def figures(self) -> dict[str, float]:
        """Return what to log about the steps since the last call."""
        ...


@dataclass(frozen=True)
class PlainSteps:
    """One step after the other: the oracle of every schedule."""

    recommender: Recommender
    optimizer: torch.optim.AdamW
    loader: PrefetchingLoader
    ranks: Ranks
    stop: threading.Event

    def next(self, step: int) -> StepResult | None:
        batch = self.loader.next_batch()
        steps = total_steps(self.recommender.recipe, self.loader.steps_per_epoch)
        return train_step(
            self.recommender,
            self.optimizer,
            batch,
            step,
            steps,
            self.ranks,
            stop=self.stop.is_set(),
        )

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

    def on_grown_data(self) -> "Progress":
        """Go on where the store has grown: figures of the earlier one do not compare."""
        return Progress(self.step, self.epochs_done)


@dataclass
class Hooks:
    """What the run does at the loop's events."""

    evaluate: Callable[[], dict[str, float]] | None
    on_step: Callable[[Progress, JaggedBatch], None]
    on_log: Callable[[Progress, dict[str, Any]], None]
    on_evaluation: Callable[[Progress, bool], None]
    checkpoint_is_due: Callable[[Progress], bool]
    save: Callable[[Progress], None]
    stop: threading.Event
    # Whether rows may be looked at now without changing the training: averaged replicas differ
    # between two averages.
    replicas_are_equal: Callable[[], bool] = lambda: True


@dataclass
class _Owed:
    """What is due and waits until replicas are equal."""

    evaluation: bool = False
    save: bool = False
    stop: bool = False


class DivergenceError(SlipstreamError):
    """The loss is no number any more; the message says what to lower."""


def total_steps(recipe: Recipe, steps_per_epoch: int) -> int:
    """Return the steps of a run that nothing stops early; an estimate under a token budget."""
    by_epochs = recipe.train.epochs * steps_per_epoch
    return by_epochs if recipe.train.max_steps is None else min(by_epochs, recipe.train.max_steps)


def run_loop(
    recipe: Recipe,
    steps: Steps,
    loader: PrefetchingLoader,
    progress: Progress,
    hooks: Hooks,
    ranks: Ranks = ALONE,
) -> str:
    """Train from where `progress` stands; return `finished`, `stopped early` or `interrupted`.

    Every way out has saved. All ranks decide alike: each step ends with one sum of what they know,
    so that a stop asked of one rank stops all after it. What looks at rows, and a stop, waits until
    replicas are equal: it never changes what is trained.
    """
    in_all, owed = total_steps(recipe, loader.steps_per_epoch), _Owed()
    while not _done(recipe, progress):
        if _patience_is_over(recipe, progress):
            return "stopped early"
        if (result := steps.next(progress.step)) is None:
            with steps.settled():
                hooks.save(progress)
            return "interrupted"
        owed.stop |= result.stop
        epoch_ended = _advance(progress, loader, result)
        hooks.on_step(progress, result.batch)
        if progress.step % recipe.train.log_every == 0:
            lr = recipe.optimizer.lr * schedule_factor(recipe.optimizer, progress.step - 1, in_all)
            mean_loss = progress.loss_sum / max(progress.loss_count, 1)
            hooks.on_log(progress, {"loss": mean_loss, "lr": lr, **steps.figures()})
            progress.loss_sum, progress.loss_count = 0.0, 0
        last, every = _done(recipe, progress), recipe.train.checkpoint_every
        owed.evaluation |= _evaluation_is_due(recipe, progress, epoch_ended, last)
        owed.save |= last or (every is not None and progress.step % every == 0)
        if not last and not hooks.replicas_are_equal():
            continue
        if owed.evaluation and hooks.evaluate is not None:
            with steps.settled():
                is_best = _record_evaluation(recipe, progress, hooks.evaluate())
                hooks.on_evaluation(progress, is_best)
            owed.save = True
            owed.stop = ranks.sum([float(hooks.stop.is_set())])[0] > 0
        stopping = owed.stop and not last
        if hooks.checkpoint_is_due(progress) or owed.save or stopping:
            with steps.settled():
                hooks.save(progress)
        if stopping:
            return "interrupted"
        owed = _Owed()
    return "finished"


def _advance(progress: Progress, loader: PrefetchingLoader, result: StepResult) -> bool:
    """Count one finished step; return whether it ended an epoch."""
    if not math.isfinite(result.loss_sum):
        raise DivergenceError(
            f"the loss became {result.loss_sum} at step {progress.step + 1}; "
            "lower optimizer.lr or tables.lr, or set optimizer.clip_norm"
        )
    progress.step += 1
    progress.epoch_step += 1
    progress.loss_sum += result.loss_sum
    progress.loss_count += result.count
    ended = loader.at_epoch_end
    if ended:
        progress.epochs_done, progress.epoch_step = progress.epochs_done + 1, 0
    return ended


def _done(recipe: Recipe, progress: Progress) -> bool:
    by_steps = recipe.train.max_steps is not None and progress.step >= recipe.train.max_steps
    return by_steps or progress.epochs_done >= recipe.train.epochs


def _patience_is_over(recipe: Recipe, progress: Progress) -> bool:
    return recipe.train.patience is not None and progress.worse_evaluations >= recipe.train.patience


def _evaluation_is_due(recipe: Recipe, progress: Progress, epoch_ended: bool, last: bool) -> bool:
    every, steps = recipe.train.evaluate_every, recipe.train.evaluation_steps
    if last or not every:
        return bool(every)
    if steps is not None:
        return progress.step % steps == 0
    return epoch_ended and progress.epochs_done % int(every) == 0


def _record_evaluation(recipe: Recipe, progress: Progress, metrics: dict[str, float]) -> bool:
    """Record an evaluation; return whether it is the best so far."""
    value = figure_of_merit(recipe, metrics)
    progress.metrics = metrics
    best = progress.best_value
    if math.isnan(value) or not (best is None or math.isnan(best) or value > best):
        progress.worse_evaluations += 1
        return False
    progress.best_value, progress.best_step, progress.best_metrics = value, progress.step, metrics
    progress.worse_evaluations = 0
    return True


def figure_of_merit(recipe: Recipe, metrics: dict[str, float]) -> float:
    """Return the number that early stopping maximises.

    It is the recipe's metric, or HR@10+NDCG@10, or the sum of the ranking tasks' AUCs.
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
