"""What the pipeline asks of its user, `Work`, and what it gives back, `StepResult`.

The pipeline knows nothing of models, losses or samplers. The training room implements `Work`; tests
implement it in a few lines. Touch this when a stage needs something new from the model in training.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from slipstream.pipeline.current_rows import RowSource
from slipstream.tables.communicator import Communicator
from slipstream.tables.exchange import Gradients, Lookups

Keys = Mapping[str, Sequence[torch.Tensor]]  # table -> key lists, as the exchange takes them


@dataclass(frozen=True)
class MicroBatch:
    """A part of a batch: its keys by table, its supervised tokens, and what computing it needs."""

    keys: Keys
    count: int
    content: Any = None  # None: no samples, nothing to compute


@dataclass(frozen=True)
class StepResult:
    """A finished training step, the same for the plain loop and for every schedule."""

    step: int
    batch: Any  # this rank's, as its loader gave it
    loss_sum: float  # over the supervised tokens of all ranks
    count: int  # supervised tokens of all ranks
    stop: bool = False  # whether a rank was asked to stop after this step
    lookup_seconds: float = 0.0  # the plain loop: planning, reading and updating the rows


class OnDemandRows(Protocol):
    """Rows of one table that `Work.loss` reads by itself, beside those of the micro-batch's keys.

    The compute lane calls these methods, in the same order on every rank.
    """

    @property
    def table(self) -> str:
        """The table's name."""
        ...

    def connect(self, rows: RowSource) -> None:
        """Read and update rows here from now on."""
        ...

    def take_part(self) -> None:
        """Serve other ranks where this rank's micro-batch has no samples."""
        ...

    def update(self, gradients: Gradients, lr: float) -> None:
        """Update the table: `gradients` are those of the micro-batches' keys at their owner."""
        ...


class Work(Protocol):
    """One model in training. Methods named with a lane are called by its thread, one at a time."""

    @property
    def mixes_samples(self) -> str | None:
        """What makes samples of a batch depend on each other (a loss, a layer), or None."""
        ...

    @property
    def on_demand(self) -> OnDemandRows | None:
        """Rows that `loss` reads by itself, or None."""
        ...

    def next_batch(self) -> Any | None:
        """Loader lane: return the next batch, None when the data has ended."""
        ...

    def cut(self, batch: Any | None, step: int, micro_batches: int) -> list[MicroBatch]:
        """Loader lane: cut a batch into exactly `micro_batches` parts; parts may be empty.

        Without a batch, all parts are empty.
        """
        ...

    @property
    def has_device(self) -> bool:
        """Whether compute happens outside host memory; only then is `transfer` called."""
        ...

    def transfer(self, micro: MicroBatch, lookups: Lookups) -> MicroBatch:
        """Device lane: return the micro-batch with content and rows on the device, for `loss`."""
        ...

    def loss(self, micro: MicroBatch, step: int, lookups: Lookups) -> torch.Tensor:
        """Compute lane: return the loss summed (never averaged) over the supervised tokens."""
        ...

    def sum_dense(self, everybody: Communicator | None) -> None:
        """Gradients lane: sum the dense gradients over all ranks in place (None: one rank)."""
        ...

    def step_dense(self, step: int) -> None:
        """Compute lane: take one step of the dense optimiser and drop the gradients."""
        ...

    def table_lr(self, step: int) -> float:
        """Return the learning rate of the rows at this step."""
        ...
