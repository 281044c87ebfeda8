"""Training by a schedule of `slipstream.pipeline`: the one door between the recommender and the
lanes.

`RecommenderWork` tells the pipeline what a step of a recommender is; `ScheduledSteps` gives the
loop its steps.
"""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slipstream.data.batch import JaggedBatch
from slipstream.errors import SlipstreamError
from slipstream.pipeline.clustering import cluster_samples, deal_samples
from slipstream.pipeline.peers import Peers
from slipstream.pipeline.runner import Done, Moved, Pipeline
from slipstream.pipeline.schedule import STALE, Schedule, make_schedule
from slipstream.pipeline.trace import shares, write_trace
from slipstream.pipeline.work import Micro
from slipstream.tables.communicator import Communicator
from slipstream.tables.exchange import Lookups
from slipstream.tables.slices import Placement
from slipstream.training.checkpoint import checkpoint_path, read_tensors
from slipstream.training.device import HOST, DeviceInputs
from slipstream.training.handed_out import HandedOut
from slipstream.training.loop import Stepped, Steps, total_steps
from slipstream.training.optimizers import schedule_factor, step_dense
from slipstream.training.ranks import ALONE, Ranks
from slipstream.training.recipe import Recipe
from slipstream.training.recommender import Recommender, StepInputs, StepPlan

if TYPE_CHECKING:
    from slipstream.training.recorder import Recorder

TRACE = "trace.json"
MOVED = "moved-"  # files of a checkpoint: weights before the newest steps moved them


class RecommenderWork:
    """`slipstream.pipeline.work.Work` of a recommender; `source` gives (batch, anything), None when
    the data has ended.
    """

    def __init__(
        self,
        recommender: Recommender,
        optimizer: torch.optim.AdamW,
        source: Any,
        steps: int,
        *,
        ranks: Ranks = ALONE,
        cluster: bool = True,
    ) -> None:
        self.recommender, self.optimizer, self.source, self.steps = (
            recommender,
            optimizer,
            source,
            steps,
        )
        self.ranks, self.cluster = ranks, cluster

    @property
    def mixes_samples(self) -> str | None:
        return self.recommender.mixes_samples

    def next_batch(self) -> Any | None:
        return self.source()

    def cut(self, batch: Any | None, step: int, micro_batches: int) -> list[Micro]:
        """Whole users per part, sharing keys where `cluster` is set; a token's dropout and
        negatives do not depend on the cut.
        """
        if batch is None:
            nothing = torch.empty(0, dtype=torch.int64)
            return [
                Micro({name: [nothing] for name in self.recommender.tables.tables}, 0)
            ] * micro_batches
        whole: JaggedBatch = batch[0]
        if micro_batches == 1:
            return [self._micro(whole, step)]
        if self.cluster:
            parts = cluster_samples(whole.items_T, whole.offsets_B1, micro_batches)
        else:
            parts = deal_samples(whole.offsets_B1, micro_batches)
        return [self._micro(whole.take(users_C), step) for users_C in parts]

    def _micro(self, batch: JaggedBatch, step: int) -> Micro:
        wanted = self.recommender.plan_step(batch, step)
        return Micro(
            wanted.keys, wanted.supervised_S.numel(), (batch, wanted) if batch.num_users else None
        )

    @property
    def has_device(self) -> bool:
        return self.recommender.carrier.device != HOST

    def carry(self, micro: Micro, lookups: Lookups) -> Micro:
        carrier = self.recommender.carrier
        with carrier.ahead_of_compute():
            return replace(
                micro, content=carrier.mark(self._gathered(micro, lookups).carried_by(carrier))
            )

    def loss(self, micro: Micro, step: int, lookups: Lookups) -> torch.Tensor:
        carried = isinstance(micro.content, DeviceInputs)
        gathered = (
            self.recommender.carrier.receive(micro.content)
            if carried
            else self._gathered(micro, lookups)
        )
        return self.recommender.loss_sum(gathered.batch, step, gathered)[0]

    def _gathered(self, micro: Micro, lookups: Lookups) -> StepInputs:
        batch, wanted = micro.content
        assert isinstance(batch, JaggedBatch) and isinstance(wanted, StepPlan)
        return self.recommender.gathered(batch, wanted, lookups)

    def sum_dense(self, everybody: Communicator | None) -> None:
        replace(self.ranks, everybody=everybody).sum_gradients_(self.recommender.model)

    def step_dense(self, step: int) -> None:
        config = self.recommender.recipe.optimizer
        step_dense(
            self.optimizer, self.recommender.model, config.lr * self._factor(step), config.clip_norm
        )

    def table_lr(self, step: int) -> float:
        return self.recommender.recipe.tables.lr * self._factor(step)

    def _factor(self, step: int) -> float:
        return schedule_factor(self.recommender.recipe.optimizer, step, self.steps)


def recipe_schedule(recipe: Recipe) -> Schedule:
    """The schedule a recipe names; `auto` begins with its usual number of micro-batches."""
    config = recipe.train
    if config.schedule in STALE:
        return make_schedule(
            config.schedule, staleness=config.staleness, synchronous_steps=config.synchronous_steps
        )
    cuts = config.schedule in ("frozen_window", "nested") and isinstance(config.micro_batches, int)
    return make_schedule(config.schedule, micro_batches=config.micro_batches if cuts else None)  # type: ignore[arg-type]


def save_moved(moved: Moved, ranks: Ranks) -> dict[str, dict[str, torch.Tensor]]:
    """What a stale schedule must remember to go on exactly, as files of a checkpoint; the first
    replica saves.
    """
    if not moved or ranks.rank >= ranks.shards:
        return {}
    parts = {"keys": 0, "weights": 1}
    tensors = {
        f"{step}/{name}/{part}": rows[place]
        for step, tables in moved.items()
        for name, rows in tables.items()
        for part, place in parts.items()
    }
    return {f"{MOVED}{ranks.shard:05d}.safetensors": tensors}


def load_moved(checkpoint: Path, ranks: Ranks) -> Moved:
    """The same from a checkpoint, whatever ranks wrote it: what this rank owns."""
    found: dict[int, dict[str, list[tuple[torch.Tensor, torch.Tensor]]]] = {}
    for path in sorted(checkpoint.glob(f"{MOVED}*.safetensors")):
        tensors = read_tensors(path, ("",))
        for full_name, keys_H in tensors.items():
            step, _, name = full_name.removesuffix("/keys").partition("/")
            if (
                full_name.endswith("/keys")
                and step.isdecimal()
                and f"{step}/{name}/weights" in tensors
            ):
                mine_H = Placement(ranks.shards).owner_of(keys_H) == ranks.shard
                rows = (keys_H[mine_H], tensors[f"{step}/{name}/weights"][mine_H])
                found.setdefault(int(step), {}).setdefault(name, []).append(rows)
    return {
        step: {name: _merged(parts) for name, parts in tables.items()}
        for step, tables in found.items()
    }


def _merged(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    keys_H, order_H = torch.cat([keys for keys, _ in parts]).sort()
    return keys_H, torch.cat([weights for _, weights in parts])[order_H]


class ScheduledSteps:
    """Steps done by a pipeline, as the loop asks for them."""

    def __init__(
        self, pipeline: Pipeline, sampler: HandedOut, ranks: Ranks, stop: threading.Event
    ) -> None:
        self.pipeline, self._sampler, self._ranks, self._stop = pipeline, sampler, ranks, stop
        self._running: Iterator[Done] = pipeline.steps()
        self._said = 0

    def next(self, step: int) -> Stepped | None:
        if self._stop.is_set() and self._ranks.world > 1:
            self.pipeline.ask_to_stop()
        done = next(self._running, None)
        if done is None:
            return None
        if done.step != step:
            raise RuntimeError(f"the pipeline did step {done.step} when step {step} was asked for")
        batch, position = done.batch
        self._sampler.hand_out(position)
        return Stepped(
            batch, done.loss_sum, done.count, self._stop.is_set() and self._ranks.world == 1
        )

    def settled(self) -> contextlib.AbstractContextManager[None]:
        return self.pipeline.settled()

    def figures(self) -> dict[str, float]:
        found = shares(self.pipeline.trace.intervals(self._said), self._said)
        newest = max(
            (
                each.step
                for each in self.pipeline.trace.intervals(self._said)
                if each.stage == "update"
            ),
            default=self._said,
        )
        self._said = newest
        return {
            name: found[name]
            for name in ("exposed_lookup", "exposed_comm", "compute_utilisation")
            if name in found
        }


@contextlib.contextmanager
def doing_steps(recorder: "Recorder", stop: threading.Event) -> Iterator[Steps | None]:
    """The steps of a run by its recipe's schedule; None for the plain loop. The trace of the newest
    steps is left in the run.
    """
    recipe, sampler, ranks = recorder.recommender.recipe, recorder.sampler, recorder.ranks
    if recipe.train.schedule == "synchronous":
        yield None
        return
    if recipe.tables.replicas == "averaged" and ranks.replicas > 1:
        raise SlipstreamError(
            f"schedule '{recipe.train.schedule}' moves rows in buffers, but "
            "tables.replicas=averaged moves them between steps too; "
            "use tables.replicas=exact, or train.schedule=synchronous"
        )
    if recorder.recommender.fetch is not None:
        raise SlipstreamError(
            f"schedule '{recipe.train.schedule}' holds the rows of a step in buffers, which "
            "loss.fetch=segmented is there to "
            "avoid; use train.schedule=synchronous, or loss.fetch=whole"
        )
    assert isinstance(sampler, HandedOut)
    steps = total_steps(recipe, sampler.steps_per_epoch)
    tables = recorder.recommender.tables
    work = RecommenderWork(
        recorder.recommender,
        recorder.optimizer,
        sampler.take,
        steps,
        ranks=ranks,
        cluster=recipe.train.cluster,
    )
    timeout = timedelta(seconds=recipe.train.rank_timeout)
    peers = Peers(tables.exchange, world=ranks.world, replicas=ranks.replicas, timeout=timeout)
    first, schedule = recorder.progress.step, recipe_schedule(recipe)
    adapt = (
        recorder.line.say
        if schedule.cuts_batches and recipe.train.micro_batches == "auto"
        else None
    )
    earlier = (
        load_moved(checkpoint_path(recorder.directory / "checkpoints", first), ranks)
        if schedule.staleness
        else {}
    )
    pipeline = Pipeline(
        schedule, work, tables.tables, peers, first_step=first, adapt=adapt, earlier=earlier
    )
    recorder.beside = lambda: save_moved(pipeline.moved(), ranks)
    try:
        with pipeline:
            yield ScheduledSteps(pipeline, sampler, ranks, stop)
    finally:
        recorder.beside = dict
        peers.close()
        if ranks.first:
            about = {"schedule": recipe.train.schedule, "run": recipe.name, "first_step": first}
            write_trace(recorder.directory / TRACE, pipeline.trace.intervals(), about)
