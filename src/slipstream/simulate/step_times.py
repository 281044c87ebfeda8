"""What every task of a step takes, as the clocks ask for it: stages with their seconds and bytes.

`PhaseTimes` is a step in a few numbers, as papers print them: compute, lookup, exchange. Its times
may grow with the number of workers (growth_laws.py). `StageSeconds` is one stage, from phases, from
a description of the hardware (hardware_times.py) or from a measured trace. Touch this when a phase
is divided among the stages in another way.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator

from slipstream.pipeline.clustering import window_shares
from slipstream.pipeline.hazards import Task
from slipstream.pipeline.schedule import Schedule
from slipstream.simulate.growth_laws import GrowthLaw
from slipstream.simulate.lane_clock import ExchangeTime, TaskTime

# How a lookup is divided among its stages: keys' lane and table's lane do half each.
LOOKUP_SPLIT = {"route": 0.25, "place": 0.25, "retrieve": 0.375, "write": 0.125}


@dataclass(frozen=True)
class StageSeconds:
    """One stage of a whole step on the mean worker.

    A stage that runs once per micro-batch takes its share of `seconds` and of the exchanges'
    network time each time, and `per_call` every time. `last` are exchanges of the last micro-batch
    only. With `by_load` a worker takes as much longer as its batch is larger.
    """

    seconds: float = 0.0
    exchanges: tuple[ExchangeTime, ...] = ()
    last: tuple[ExchangeTime, ...] = ()
    per_call: float = 0.0
    by_load: bool = False


@dataclass(frozen=True)
class StepTimes:
    """The stages of a step, cut into micro-batches of these shares.

    `load` returns how large each worker's batch of a step is, relative to the mean.
    """

    schedule: Schedule
    stages: Mapping[str, StageSeconds]
    shares_M: np.ndarray
    load: Callable[[int], np.ndarray] | None = None
    _parts: dict[tuple[str, int], TaskTime] = field(default_factory=dict, compare=False)

    def __call__(self, task: Task) -> TaskTime:
        """Return what a task takes on every worker."""
        part = self._parts.get((task.stage, task.micro))
        if part is None:
            part = self._parts[task.stage, task.micro] = self._part(task)
        stage = self.stages.get(task.stage)
        if stage is None or not stage.by_load or self.load is None:
            return part
        load_W = self.load(task.step)
        return TaskTime(
            stage.per_call + (part.seconds - stage.per_call) * load_W,
            tuple(replace(each, network=each.network * load_W) for each in part.exchanges),
        )

    def _part(self, task: Task) -> TaskTime:
        """Return what a task takes on the mean worker."""
        stage = self.stages.get(task.stage, StageSeconds())
        each = self.schedule[task.stage].each
        share = float(self.shares_M[task.micro]) if each else 1.0
        exchanges = tuple(
            replace(one, network=np.multiply(one.network, share)) for one in stage.exchanges
        )
        if not each or task.micro == len(self.shares_M) - 1:
            exchanges += stage.last
        return TaskTime(stage.per_call + share * stage.seconds, exchanges)

    @cached_property
    def compute_seconds(self) -> float:
        """Seconds of forward, backward and update of a whole step on the mean worker."""
        parts = (self.stages.get(name, StageSeconds()) for name in ("compute", "update"))
        return sum(part.seconds for part in parts)


def shares_of(schedule: Schedule, taper: float | None = None) -> np.ndarray:
    """Return the share of a step's tokens that each micro-batch has; None: as they are shipped."""
    if taper is None:
        return window_shares(schedule.micro_batches)
    return window_shares(schedule.micro_batches, taper)


class PhaseTimes(BaseModel):
    """A step in milliseconds, each a number or a law of growth in the number of workers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    compute: GrowthLaw = Field(description="forward, backward and update")
    lookup: GrowthLaw = Field(
        default=GrowthLaw(),
        description="keys to owners, rows out of the tables, rows back into them",
    )
    exchange: GrowthLaw = Field(
        default=GrowthLaw(),
        description="rows to the workers and gradients back, all workers one group",
    )
    between_groups: GrowthLaw = Field(
        default=GrowthLaw(), description="gradients to the other replicas, for each of them"
    )
    dense: GrowthLaw = Field(default=GrowthLaw(), description="all-reduce of the dense gradients")
    overhead: GrowthLaw = Field(
        default=GrowthLaw(), description="what a pipelined step adds before its rows can be sent"
    )
    lookup_split: dict[str, float] = Field(
        default_factory=lambda: dict(LOOKUP_SPLIT),
        description="how a lookup is divided among route, place, retrieve and write",
    )
    between_at_end: bool = Field(
        default=True,
        description="replicas are summed once, after the last micro-batch, as our pipeline does",
    )
    samples: int = Field(default=512, ge=1, description="samples of a worker and step")

    @field_validator(
        "compute", "lookup", "exchange", "between_groups", "dense", "overhead", mode="before"
    )
    @classmethod
    def _constant(cls, value: object) -> object:
        return {"shape": "constant", "constant": value} if isinstance(value, int | float) else value

    @field_validator("lookup_split")
    @classmethod
    def _whole(cls, value: dict[str, float]) -> dict[str, float]:
        if value.keys() - LOOKUP_SPLIT.keys() or abs(sum(value.values()) - 1) > 1e-6:
            raise ValueError(f"must divide 1 among {', '.join(LOOKUP_SPLIT)}")
        return value

    def stages(self, shards: int, replicas: int) -> dict[str, StageSeconds]:
        """Return the stages at shards x replicas workers.

        An exchange within one of M groups takes 1/M of that among all workers.
        """
        workers = shards * replicas
        lookup = self.lookup.at(workers) / 1e3
        half = self.exchange.at(workers) / replicas / 2e3
        between = (replicas - 1) * self.between_groups.at(workers) / 1e3
        rows, sums = ExchangeTime("group", half), (ExchangeTime("replicas", between),)
        collected = StageSeconds(exchanges=(rows, *sums))
        if self.between_at_end:
            collected = StageSeconds(exchanges=(rows,), last=sums)
        found = {
            name: StageSeconds(seconds=share * lookup) for name, share in self.lookup_split.items()
        }
        found |= {
            "synchronise": StageSeconds(self.overhead.at(workers) / 1e3),
            "answer": StageSeconds(exchanges=(rows,)),
            "compute": StageSeconds(self.compute.at(workers) / 1e3, by_load=True),
            "collect": collected,
        }
        if dense := self.dense.at(workers) / 1e3:
            found["reduce"] = StageSeconds(exchanges=(ExchangeTime("everybody", dense),))
        return found
