"""What the pipeline asks of those who use it: the work of a step.

The pipeline knows nothing of models, losses or samplers. The training room implements `Work`; tests
implement it in a few lines.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from slipstream.tables.communicator import Communicator
from slipstream.tables.exchange import Lookups

Keys = Mapping[str, Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Micro:
    """A part of a batch: its keys per table, its supervised tokens, and whatever the work needs to
    compute it.
    """

    keys: Keys
    count: int
    content: Any = None  # None: no samples, nothing to compute


class Work(Protocol):
    """One model in training. Methods named with a lane may run in a thread of their own, one call
    at a time.
    """

    @property
    def mixes_samples(self) -> str | None:
        """The name of what makes samples of a batch see one another (a loss, a layer), if anything
        does.
        """
        ...

    def next_batch(self) -> Any | None:
        """Loader lane: the next batch, None when the data has ended."""
        ...

    def cut(self, batch: Any | None, step: int, micro_batches: int) -> list[Micro]:
        """Loader lane: exactly `micro_batches` parts, some perhaps without samples; all of them
        when there is no batch.
        """
        ...

    @property
    def has_device(self) -> bool:
        """Whether compute happens elsewhere than in host memory; only then is `carry` called."""
        ...

    def carry(self, micro: Micro, lookups: Lookups) -> Micro:
        """Device lane: the micro-batch with its content and rows on the device, as `loss` will be
        given it.
        """
        ...

    def loss(self, micro: Micro, step: int, lookups: Lookups) -> torch.Tensor:
        """Compute lane: the loss summed (never averaged) over the supervised tokens."""
        ...

    def sum_dense(self, everybody: Communicator | None) -> None:
        """Gradients lane: sum the dense gradients over all ranks, in place (None: there is one
        rank).
        """
        ...

    def step_dense(self, step: int) -> None:
        """Compute lane: one step of the dense optimiser from the gradients, which are forgotten
        after it.
        """
        ...

    def table_lr(self, step: int) -> float:
        """The learning rate of the rows at this step."""
        ...
