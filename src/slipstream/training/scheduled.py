"""Training by a schedule of `slipstream.pipeline`: where the recommender meets the lanes.

`RecommenderWork` is a step of a recommender as the pipeline asks for it; `ScheduledSteps` gives the
loop its steps; `recipe_steps` chooses between a schedule and the plain loop. Touch this when a
schedule needs something new from the recommender, or when a run must keep more for a resumption.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from slipstream.data.batch import JaggedBatch
from slipstream.data.loader import LoadedBatch, PrefetchingLoader
from slipstream.errors import SlipstreamError
from slipstream.pipeline import adaptive
from slipstream.pipeline.clustering import cluster_samples, deal_samples
from slipstream.pipeline.lane_groups import LaneGroups
from slipstream.pipeline.runner import Pipeline, StaleRows
from slipstream.pipeline.schedule import STALE, Schedule, make_schedule
from slipstream.pipeline.trace import shares, write_trace
from slipstream.pipeline.work import MicroBatch, StepResult
from slipstream.tables.communicator import Communicator
from slipstream.tables.exchange import Lookups
from slipstream.tables.slices import Placement
from slipstream.training import auto_schedule
from slipstream.training.checkpoint import checkpoint_path, read_tensors
from slipstream.training.device import HOST, DeviceInputs
from slipstream.training.loop import PlainSteps, Steps, total_steps
from slipstream.training.negative_fetch import SegmentedRows
from slipstream.training.optimizers import schedule_factor, step_dense
from slipstream.training.ranks import ALONE, Ranks
from slipstream.training.recipe import Recipe
from slipstream.training.recommender import Recommender
from slipstream.training.step import StepPlan

if TYPE_CHECKING:
    from slipstream.training.recorder import Recorder

TRACE = "trace.json"
STALE_ROWS = "stale-rows-"  # files of a checkpoint: weights before the newest steps updated them
STALE_ROWS_BEFORE = "moved-"  # what these files were called in earlier checkpoints


class RecommenderWork:
    """`slipstream.pipeline.work.Work` of a recommender; `take` returns None when the data ends."""

    def __init__(
        self,
        recommender: Recommender,
        optimizer: torch.optim.AdamW,
        take: Callable[[], LoadedBatch | None],
        steps: int,
        *,
        ranks: Ranks = ALONE,
        cluster: bool = True,
    ) -> None:
        self.recommender, self.optimizer, self.take = recommender, optimizer, take
        self.steps, self.ranks, self.cluster = steps, ranks, cluster
        fetch = recommender.fetch
        self.on_demand = None if fetch is None else SegmentedRows(fetch)

    @property
    def mixes_samples(self) -> str | None:
        return self.recommender.mixes_samples

    def next_batch(self) -> LoadedBatch | None:
        return self.take()

    def cut(self, batch: LoadedBatch | None, step: int, micro_batches: int) -> list[MicroBatch]:
        """Cut a batch into whole users; dropout and negatives of a token do not depend on it."""
        if batch is None:
            nothing = [torch.empty(0, dtype=torch.int64)]
            return [
                MicroBatch(dict.fromkeys(self.recommender.tables.tables, nothing), 0)
            ] * micro_batches
        whole = batch.batch
        if micro_batches == 1:
            return [self._micro_batch(whole, step)]
        if self.cluster:
            parts = cluster_samples(whole.items_T, whole.offsets_B1, micro_batches)
        else:
            parts = deal_samples(whole.offsets_B1, micro_batches)
        return [self._micro_batch(whole.take(users_C), step) for users_C in parts]

    def _micro_batch(self, batch: JaggedBatch, step: int) -> MicroBatch:
        plan = self.recommender.plan_step(batch, step)
        return MicroBatch(plan.key_lists(), plan.count, plan if batch.num_users else None)

    @property
    def has_device(self) -> bool:
        return self.recommender.device_transfer.device != HOST

    def transfer(self, micro: MicroBatch, lookups: Lookups) -> MicroBatch:
        assert isinstance(micro.content, StepPlan)
        transfer, inputs = (
            self.recommender.device_transfer,
            self.recommender.inputs(micro.content, lookups),
        )
        with transfer.ahead_of_compute():
            return replace(micro, content=transfer.mark(inputs.map_tensors(transfer.copy)))

    def loss(self, micro: MicroBatch, step: int, lookups: Lookups) -> torch.Tensor:
        if isinstance(micro.content, DeviceInputs):
            inputs = self.recommender.device_transfer.receive(micro.content)
        else:
            assert isinstance(micro.content, StepPlan)
            inputs = self.recommender.inputs(micro.content, lookups)
        if self.on_demand is not None and inputs.segments is not None:
            self.on_demand.steps.append(inputs.segments)
        return self.recommender.loss(inputs)

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
    """Return the schedule a recipe names; `auto` begins with its usual number of micro-batches."""
    config, parts = recipe.train, recipe.train.accumulate
    if config.schedule in STALE:
        return make_schedule(
            config.schedule,
            micro_batches=parts,
            staleness=config.staleness,
            synchronous_steps=config.synchronous_steps,
        )
    micro_batches = parts
    if config.schedule in ("frozen_window", "nested"):
        micro_batches *= 8 if config.micro_batches == "auto" else config.micro_batches
    ahead = config.buffers_ahead if config.buffers_ahead > 1 else None
    return make_schedule(config.schedule, micro_batches=micro_batches, buffers_ahead=ahead)


def stale_row_files(rows: StaleRows, ranks: Ranks) -> dict[str, dict[str, torch.Tensor]]:
    """Return what a stale schedule needs to resume exactly, as files; the first replica saves."""
    if not rows or ranks.rank >= ranks.shards:
        return {}
    tensors = {
        f"{step}/{name}/{part}": value
        for step, tables in rows.items()
        for name, (keys_U, weights_UD) in tables.items()
        for part, value in (("keys", keys_U), ("weights", weights_UD))
    }
    return {f"{STALE_ROWS}{ranks.shard:05d}.safetensors": tensors}


def load_stale_rows(checkpoint: Path, ranks: Ranks) -> StaleRows:
    """Read what this rank owns of a checkpoint's stale rows, whatever ranks wrote them."""
    found: dict[int, dict[str, list[tuple[torch.Tensor, torch.Tensor]]]] = {}
    for path in sorted(
        path
        for prefix in (STALE_ROWS, STALE_ROWS_BEFORE)
        for path in checkpoint.glob(f"{prefix}*.safetensors")
    ):
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
        step: {name: _merge(parts) for name, parts in tables.items()}
        for step, tables in found.items()
    }


def _merge(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Join the rows of several files, ascending by key."""
    keys_H, order_H = torch.cat([keys for keys, _ in parts]).sort()
    return keys_H, torch.cat([weights for _, weights in parts])[order_H]


class ScheduledSteps:
    """Steps made by a pipeline, as the loop asks for them."""

    def __init__(
        self, pipeline: Pipeline, loader: PrefetchingLoader, ranks: Ranks, stop: threading.Event
    ) -> None:
        self.pipeline, self._loader, self._ranks, self._stop = pipeline, loader, ranks, stop
        self._running: Iterator[StepResult] = pipeline.steps()
        self._logged = 0  # the step up to which figures were given

    def next(self, step: int) -> StepResult | None:
        if self._stop.is_set() and self._ranks.world > 1:
            self.pipeline.ask_to_stop()
        result = next(self._running, None)
        if result is None:
            return None
        if result.step != step:
            raise RuntimeError(f"the pipeline did step {result.step} instead of step {step}")
        loaded: LoadedBatch | None = result.batch
        assert loaded is not None
        self._loader.mark_used(loaded)
        stop = self._stop.is_set() and self._ranks.world == 1
        return replace(result, batch=loaded.batch, stop=stop)

    def settled(self) -> contextlib.AbstractContextManager[None]:
        return self.pipeline.settled()

    def figures(self) -> dict[str, float]:
        intervals = self.pipeline.trace.intervals(self._logged)
        found = shares(intervals, self._logged)
        updated = (each.step for each in intervals if each.stage == "update")
        self._logged = max(updated, default=self._logged)
        names = ("exposed_lookup", "exposed_comm", "compute_utilisation")
        return {name: found[name] for name in names if name in found}


@contextlib.contextmanager
def recipe_steps(recorder: "Recorder", stop: threading.Event) -> Iterator[Steps]:
    """Make the steps of a run: the plain loop, the recipe's schedule, or what `auto` chooses."""
    recommender, ranks = recorder.recommender, recorder.ranks
    recipe, loader = recommender.recipe, recorder.loader
    if recipe.train.schedule == "auto":
        with _auto_steps(recorder, stop) as steps:
            yield steps
        return
    if recipe.train.schedule == "synchronous":
        yield PlainSteps(recommender, recorder.optimizer, loader, ranks, stop)
        return
    _refuse_unbuffered(recommender, ranks)
    groups = _lane_groups(recommender, ranks)
    first, schedule = recorder.progress.step, recipe_schedule(recipe)
    adapts = recipe.train.micro_batches == "auto" and recipe.train.accumulate == 1
    adapts = adapts and schedule.cuts_batches
    stale_rows: StaleRows = {}
    if schedule.staleness:
        checkpoint = checkpoint_path(recorder.directory / "checkpoints", first)
        stale_rows = load_stale_rows(checkpoint, ranks)
    pipeline = Pipeline(
        schedule,
        _work(recorder),
        recommender.tables.tables,
        groups,
        first_step=first,
        adapt=recorder.line.print if adapts else None,
        stale_rows=stale_rows,
    )
    recorder.extra_files = lambda: stale_row_files(pipeline.stale_rows(), ranks)
    try:
        with pipeline:
            yield ScheduledSteps(pipeline, loader, ranks, stop)
    finally:
        recorder.extra_files = dict
        groups.close()
        _write_trace(recorder, pipeline)


@contextlib.contextmanager
def _auto_steps(recorder: "Recorder", stop: threading.Event) -> Iterator[Steps]:
    """Make the steps of `train.schedule=auto`; groups for schedules are made once one is tried."""
    recommender, ranks, loader = recorder.recommender, recorder.ranks, recorder.loader
    work, groups = _work(recorder), list[LaneGroups]()
    candidates = auto_schedule.possible_schedules(recommender, work)
    reason = auto_schedule.plain_reason(recorder, candidates, work.steps)
    if reason is not None:
        if reason:
            recorder.line.print(adaptive.plain_because(reason))
        yield PlainSteps(recommender, recorder.optimizer, loader, ranks, stop)
        return

    def open_pipeline(schedule: Schedule, step: int) -> ScheduledSteps:
        if not groups:
            groups.append(_lane_groups(recommender, ranks))
        tables = recommender.tables.tables
        pipeline = Pipeline(schedule, work, tables, groups[0], first_step=step)
        return ScheduledSteps(pipeline, loader, ranks, stop)

    steps = auto_schedule.AutoSteps(recorder, stop, candidates, open_pipeline, work.steps)
    try:
        yield steps
    finally:
        last = steps.close()
        for made in groups:
            made.close()
        if last is not None:
            _write_trace(recorder, last.pipeline)


def _work(recorder: "Recorder") -> RecommenderWork:
    recipe, loader = recorder.recommender.recipe, recorder.loader
    return RecommenderWork(
        recorder.recommender,
        recorder.optimizer,
        loader.take,
        total_steps(recipe, loader.steps_per_epoch),
        ranks=recorder.ranks,
        cluster=recipe.train.cluster,
    )


def _lane_groups(recommender: Recommender, ranks: Ranks) -> LaneGroups:
    """Make the process groups of all lanes. Collective."""
    return LaneGroups(
        recommender.tables.exchange,
        world=ranks.world,
        replicas=ranks.replicas,
        timeout=timedelta(seconds=recommender.recipe.train.rank_timeout),
    )


def _write_trace(recorder: "Recorder", pipeline: Pipeline) -> None:
    if recorder.ranks.first:
        run, first = recorder.recommender.recipe.name, pipeline.first_step
        about = {"schedule": pipeline.schedule.name, "run": run, "first_step": first}
        write_trace(recorder.directory / TRACE, pipeline.trace.intervals(), about)


def _refuse_unbuffered(recommender: Recommender, ranks: Ranks) -> None:
    """Raise where a step's rows cannot live in buffers."""
    recipe = recommender.recipe
    if recipe.tables.replicas == "averaged" and ranks.replicas > 1:
        raise SlipstreamError(
            f"schedule '{recipe.train.schedule}' updates rows in buffers, but "
            "tables.replicas=averaged updates them between steps too; "
            "use tables.replicas=exact, or train.schedule=synchronous"
        )
