"""The shipped plain loop over the batches of the benchmark, and where the time of its steps goes.

This is what users run with `train.schedule=synchronous`: `PlainSteps` over a prefetching loader.
Tables and communicators time themselves, the rest follows from what a step reports. Touch this when
the plain loop does something else in a step.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from benchmarks.pipeline.link import EmulatedLink
from slipstream.data.batch import JaggedBatch
from slipstream.data.loader import PrefetchingLoader
from slipstream.data.sampler import TrainingSampler
from slipstream.tables.communicator import Communicator
from slipstream.training.features import ITEM
from slipstream.training.loop import PlainSteps
from slipstream.training.ranks import Ranks
from slipstream.training.recommender import Recommender

T = TypeVar("T")


class Circle:
    """Batches in a circle from a place on, as a sampler hands them out."""

    epoch, at_epoch_end = 0, False

    def __init__(self, batches: Sequence[JaggedBatch], start: int = 0) -> None:
        self._batches, self._next = batches, start

    @property
    def steps_per_epoch(self) -> int:
        return len(self._batches)

    def next_batch(self) -> JaggedBatch:
        self._next += 1
        return self._batches[(self._next - 1) % len(self._batches)]

    def state_dict(self) -> dict[str, Any]:
        return {}


class TimedCommunicator(Communicator):
    """A communicator that keeps the seconds of its messages, and may be a slow link."""

    def __init__(self, group: dist.ProcessGroup, link: EmulatedLink | None = None) -> None:
        super().__init__(group)
        self._link, self.samples = link, list[float]()

    def _timed(self, call: Callable[..., T], size: int, *arguments: Any) -> T:
        begin = time.perf_counter()
        result = call(*arguments)
        if self._link is not None:
            self._link.carry(size)
        self.samples.append(time.perf_counter() - begin)
        return result

    def swap_counts(self, counts_WC: torch.Tensor) -> torch.Tensor:
        return self._timed(super().swap_counts, 0, counts_WC)

    def swap(
        self, sent: torch.Tensor, send_sizes: list[int], receive_sizes: list[int], purpose: str
    ) -> torch.Tensor:
        size = (sum(send_sizes) - send_sizes[self.rank]) * sent.element_size()
        return self._timed(super().swap, size, sent, send_sizes, receive_sizes, purpose)

    def sum_(self, values: torch.Tensor) -> torch.Tensor:
        return self._timed(super().sum_, values.numel() * values.element_size(), values)


class PlainLoop:
    """The plain loop of one rank; its recommender is its own."""

    def __init__(
        self,
        recommender: Recommender,
        optimizer: torch.optim.AdamW,
        ranks: Ranks,
        link_rate: float | None = None,
    ) -> None:
        link = None if link_rate is None else EmulatedLink(link_rate)
        assert ranks.everybody is not None and ranks.shard_group is not None
        self.recommender, self.optimizer = recommender, optimizer
        self._between = TimedCommunicator(ranks.everybody.group, link)
        self._exchange = TimedCommunicator(ranks.shard_group, link)
        recommender.tables.exchange.communicator = self._exchange
        self._ranks = replace(ranks, everybody=self._between)

    def run(
        self, batches: Sequence[JaggedBatch], start: int, warm_up: int, steps: int
    ) -> dict[str, float]:
        """Take steps and return the seconds of one after `warm_up`, in all and by what it did."""
        sampler = cast(TrainingSampler, Circle(batches, start))
        found: list[dict[str, float]] = []
        with PrefetchingLoader(sampler) as loader:
            plain = PlainSteps(
                self.recommender, self.optimizer, loader, self._ranks, threading.Event()
            )
            for step in range(warm_up + steps):
                found.append(self._step(plain, step))
        timed = found[warm_up:]
        return {name: sum(one[name] for one in timed) / len(timed) for name in timed[0]}

    def _step(self, plain: PlainSteps, step: int) -> dict[str, float]:
        """Take one step.

        What a step reports as its lookup holds planning, tables, their exchange, and the first sum
        over the ranks; the other two sums stand between compute and the next step.
        """
        table: Any = self.recommender.tables[ITEM]
        before, begin = table.seconds, time.perf_counter()
        self._between.samples.clear()
        self._exchange.samples.clear()
        result = plain.next(step)
        seconds = time.perf_counter() - begin
        assert result is not None
        first, *others = self._between.samples
        lookup, exchanged = table.seconds - before, sum(self._exchange.samples)
        return {
            "step_seconds": seconds,
            "lookup_seconds": lookup,
            "comm_seconds": exchanged + first + sum(others),
            "host_seconds": result.lookup_seconds - lookup - exchanged - first,
            "compute_seconds": seconds - result.lookup_seconds - sum(others),
        }
