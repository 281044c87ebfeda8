"""A small training problem for the tests of the pipeline: two tables, keys that skip batches.

`plain_loop` and, with `older_rows`, the stale loop are the oracles: written by hand, without
buffers, lanes or schedules.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slipstream.pipeline.hazards import Task
from slipstream.pipeline.lane_groups import LaneGroups
from slipstream.pipeline.runner import Pipeline
from slipstream.pipeline.schedule import Schedule, make_schedule
from slipstream.pipeline.work import MicroBatch
from slipstream.tables.collection import add
from slipstream.tables.communicator import Communicator
from slipstream.tables.exchange import Exchange
from slipstream.tables.factory import make_table
from slipstream.tables.memory_table import MemoryTable
from slipstream.tables.row_optimizers import RowOptimizer, RowwiseAdagrad, RowwiseAdam
from slipstream.tables.slices import Placement

DIM = 4
OPTIMIZERS = {"adagrad": RowwiseAdagrad(), "adam": RowwiseAdam()}
ROWS = {"item": 60, "user": 12}


@dataclass(frozen=True)
class Problem:
    """Batches that follow from the seed; every rank has its own."""

    steps: int = 40
    samples: int = 8
    length: int = 4
    seed: int = 0
    dtype: torch.dtype = torch.float32
    rank: int = 0

    def batch(self, step: int) -> dict[str, Any]:
        rng = np.random.default_rng([self.seed, step, self.rank])
        keys = np.minimum(rng.zipf(1.3, (self.samples, self.length)), ROWS["item"] // 2) - 1
        keys[0, 0] = ROWS["item"] // 2 + step % 2 * 3  # used by every other batch only
        keys[1 % self.samples, 0] = ROWS["item"] // 2 + 10 + step % 3 * 3  # two batches off, one on
        users = rng.integers(0, ROWS["user"], self.samples)
        targets = rng.standard_normal(self.samples)
        return {
            "items": torch.from_numpy(keys),
            "users": torch.from_numpy(users),
            "targets": torch.from_numpy(targets).to(self.dtype),
        }


def make_tables(
    problem: Problem, optimizer: RowOptimizer, *, world: int = 1, rank: int = 0
) -> dict[str, Any]:
    """The memory tier, whole or this rank's part."""
    options: dict[str, Any] = {
        "seed": 5,
        "init_scale": 0.5,
        "dtype": problem.dtype,
        "placement": Placement(world),
        "rank": rank,
    }
    return {name: MemoryTable(name, rows, DIM, optimizer, **options) for name, rows in ROWS.items()}


@dataclass
class SmallWork:
    """The sum of squares of (rows · matrix · user row - target)."""

    problem: Problem
    mixes_samples: str | None = None
    has_device: bool = False
    on_demand: Any = None
    transferred: int = 0
    fails: tuple[str, int] | None = None  # (method, step) that raises
    taken: int = 0
    matrix: torch.nn.Parameter = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.matrix = torch.nn.Parameter(
            torch.randn(DIM, DIM, generator=generator, dtype=self.problem.dtype)
        )
        self.optimizer = torch.optim.SGD([self.matrix], lr=0.05, momentum=0.9)

    def next_batch(self) -> Any:
        if self.taken >= self.problem.steps:
            return None
        self.taken += 1
        return self.problem.batch(self.taken - 1)

    def cut(self, batch: Any, step: int, micro_batches: int) -> list[MicroBatch]:
        if batch is None:
            nothing = torch.empty(0, dtype=torch.int64)
            return [MicroBatch({"item": [nothing], "user": [nothing]}, 0)] * micro_batches
        parts = []
        for part in range(micro_batches):
            chosen = slice(part, None, micro_batches)
            content = {name: value[chosen] for name, value in batch.items()}
            count = content["users"].numel()
            keys = {"item": [content["items"]], "user": [content["users"]]}
            parts.append(MicroBatch(keys, count, content if count else None))
        return parts

    def transfer(self, micro: MicroBatch, lookups: Any) -> MicroBatch:
        self.transferred += 1
        return micro

    def loss(self, micro: MicroBatch, step: int, lookups: Any) -> torch.Tensor:
        if self.fails == ("loss", step):
            raise ArithmeticError("the loss failed")
        items_SLD = lookups["item"].rows_UD[lookups["item"].inverses[0]]
        users_SD = lookups["user"].rows_UD[lookups["user"].inverses[0]]
        predicted_S = (items_SLD.sum(1) @ self.matrix * users_SD).sum(1)
        return ((predicted_S - micro.content["targets"]) ** 2).sum()

    def sum_dense(self, everybody: Communicator | None) -> None:
        if everybody is not None:
            self.matrix.grad = everybody.sum_(
                torch.zeros_like(self.matrix) if self.matrix.grad is None else self.matrix.grad
            )

    def step_dense(self, step: int) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def table_lr(self, step: int) -> float:
        return 0.1 / (1 + 0.01 * step)


def outcome(
    work: SmallWork, tables: dict[str, Any], world: int = 1, rank: int = 0
) -> dict[str, torch.Tensor]:
    """Everything that was trained: dense weights and momentum, this rank's rows and their state."""
    found = {"matrix": work.matrix.detach().clone()}
    found |= {
        f"momentum {i}": state["momentum_buffer"].clone()
        for i, state in enumerate(work.optimizer.state.values())
    }
    for name, rows in ROWS.items():
        keys = torch.arange(rows)
        read = tables[name].read(keys[Placement(world).owner_of(keys) == rank])
        found |= {
            f"{name} weights": read.weights_UD,
            **{f"{name} {key}": value for key, value in read.state.items()},
        }
    return found


@dataclass
class Together:
    """What the plain loop needs of other ranks."""

    exchange: Exchange
    everybody: Communicator | None = None
    replicas: Any = None


def plain_loop(
    problem: Problem,
    optimizer: RowOptimizer,
    micro_batches: int = 1,
    tables: dict[str, Any] | None = None,
    together: Together | None = None,
    data_steps: int | None = None,
    read_rows: Any = None,
) -> tuple[SmallWork, dict[str, Any]]:
    """Read, loss, backward, update; a rank whose data ends early continues with empty batches."""
    work, tables = SmallWork(problem), tables or make_tables(problem, optimizer)
    together = together or Together(Exchange(tables))
    exchange = together.exchange
    for step in range(problem.steps):
        batch = work.next_batch() if data_steps is None or step < data_steps else None
        micros, lookups_of = work.cut(batch, step, micro_batches), []
        count = sum(micro.count for micro in micros)
        if together.everybody is not None:
            count = int(together.everybody.sum_(torch.tensor([count]))[0])
        rows_of = (
            (lambda name, owned: tables[name].gather(owned))
            if read_rows is None
            else read_rows(step, tables)
        )
        for micro in micros:
            route = exchange.route(micro.keys)
            lookups_of.append(
                exchange.answer(
                    route, {name: rows_of(name, owned) for name, owned in route.owned.items()}
                )
            )
            if micro.content is not None:
                (work.loss(micro, step, lookups_of[-1]) / count).backward()
        collected = add([exchange.collect(lookups.route, lookups) for lookups in lookups_of])
        if together.replicas is not None:
            collected = together.replicas.before_update(collected)
        for name, (keys, grads) in collected.items():
            tables[name].apply(keys, grads, work.table_lr(step))
        work.sum_dense(together.everybody)
        work.step_dense(step)
    return work, tables


def plain_outcome(
    problem: Problem, optimizer: RowOptimizer, micro_batches: int = 1, **options: Any
) -> dict[str, torch.Tensor]:
    return outcome(*plain_loop(problem, optimizer, micro_batches, **options))


def older_rows(staleness: int, synchronous_steps: int = 0, world: int = 1, rank: int = 0) -> Any:
    """Read rows for `plain_loop` as they were before step t - staleness.

    None is older than step `synchronous_steps`.
    """
    snapshots: list[dict[str, torch.Tensor]] = []
    keys = {
        name: torch.arange(rows)[Placement(world).owner_of(torch.arange(rows)) == rank]
        for name, rows in ROWS.items()
    }

    def read_rows(step: int, tables: dict[str, Any]) -> Any:
        snapshots.append({name: table.gather(keys[name]) for name, table in tables.items()})
        old = snapshots[max(min(step, synchronous_steps), step - staleness)]
        return lambda name, owned: old[name][torch.searchsorted(keys[name], owned)]

    return read_rows


def stale_loop(
    problem: Problem,
    optimizer: RowOptimizer,
    staleness: int,
    micro_batches: int = 1,
    synchronous_steps: int = 0,
) -> dict[str, Any]:
    return plain_outcome(
        problem, optimizer, micro_batches, read_rows=older_rows(staleness, synchronous_steps)
    )


def differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> dict[str, float]:
    """What is not bit for bit the same, and by how much."""
    assert one.keys() == other.keys()
    return {
        name: float((one[name].double() - other[name].double()).abs().max())
        for name in one
        if not torch.equal(one[name], other[name])
    }


def pipelined(
    schedule: Schedule,
    problem: Problem,
    optimizer: RowOptimizer,
    tables: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """What a pipeline trains by this schedule."""
    work, tables = SmallWork(problem), tables or make_tables(problem, optimizer)
    with Pipeline(schedule, work, tables, LaneGroups(Exchange(tables)), **options) as pipeline:
        steps = [done.step for done in pipeline.steps()]
    assert steps == list(range(problem.steps))
    return outcome(work, tables)


def seeded_delays(seed: int, slow: str | None = None) -> Callable[[Task], float]:
    """Pauses before some tasks, decided by (seed, task), and before every task of stage `slow`."""

    def delay(task: Task) -> float:
        if slow == task.stage:
            return 0.004
        draw = hash((seed, task.step, task.micro, *task.stage.encode())) % 1000
        return 0.0 if draw > 150 else 2e-3 * draw / 150

    return delay


def lanes_left() -> list[str]:
    """Names of the threads that a pipeline or a loader has left behind."""
    return [
        thread.name for thread in threading.enumerate() if thread.name.startswith("slipstream-")
    ]


def start_pipeline(
    name: str, problem: Problem, **options: Any
) -> tuple[SmallWork, dict[str, Any], Pipeline]:
    """A work, its tables, and a pipeline over them that cuts batches in two."""
    work, tables = SmallWork(problem), make_tables(problem, OPTIMIZERS["adam"])
    schedule = make_schedule(name, micro_batches=2)
    return work, tables, Pipeline(schedule, work, tables, LaneGroups(Exchange(tables)), **options)


def tables_of(tier: str, directory: Path | None, **options: Any) -> dict[str, Any]:
    """The problem's tables on a tier, with a small cache."""
    common: dict[str, Any] = {
        "seed": 5,
        "init_scale": 0.5,
        "directory": directory,
        "cache_bytes": 1 << 12,
        **options,
    }
    return {
        name: make_table(tier, name, rows, DIM, OPTIMIZERS["adam"], **common)
        for name, rows in ROWS.items()
    }
