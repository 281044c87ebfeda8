"""The loader of training: makes the next batches in a thread while the caller computes.

Cutting windows and balancing ranks then cost no step time, in the plain loop and in every schedule.
The batches are the sampler's own, in its order. The state is that of the batches *used*, so a
resumed run makes again what was made ahead and never used. Touch this when batches are made or
counted in another way; what is in a batch is the sampler's business.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from slipstream.data.batch import JaggedBatch, merge_batches
from slipstream.data.sampler import TrainingSampler


@dataclass(frozen=True)
class Position:
    """Where a sampler stands after a batch."""

    state: dict[str, Any]
    epoch: int
    at_epoch_end: bool


@dataclass(frozen=True)
class LoadedBatch:
    """A batch and the sampler's position after it."""

    batch: JaggedBatch
    position: Position


class PrefetchingLoader:
    """The batches of a sampler, made up to `ahead` before they are asked for.

    With `merge` a batch is so many of the sampler's, one after the other; the last of an epoch may
    be fewer.
    One thread calls `take` (or `next_batch`). Close the loader, or use it as a context manager.
    """

    def __init__(self, sampler: TrainingSampler, ahead: int = 2, merge: int = 1) -> None:
        if ahead < 1:
            raise ValueError(f"a loader works at least one batch ahead, got {ahead}")
        self._sampler, self._ahead, self._merge = sampler, ahead, merge
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="slipstream-loader")
        self._queue: deque[Future[LoadedBatch]] = deque()
        self._used = self._position()

    def take(self) -> LoadedBatch:
        """Return the next batch without counting it as used; raise what the sampler raises."""
        while len(self._queue) <= self._ahead:
            self._queue.append(self._thread.submit(self._make))
        return self._queue.popleft().result()

    def put_back(self, loaded: Sequence[LoadedBatch]) -> None:
        """Give back the newest batches taken and not used: `take` returns them again, in order."""
        for batch in reversed(loaded):
            made: Future[LoadedBatch] = Future()
            made.set_result(batch)
            self._queue.appendleft(made)

    def mark_used(self, loaded: LoadedBatch) -> None:
        """Count a batch, and with it all before it, as used."""
        self._used = loaded.position

    def next_batch(self) -> JaggedBatch:
        """Return the next batch and count it as used."""
        loaded = self.take()
        self.mark_used(loaded)
        return loaded.batch

    def epoch_batches(self) -> Iterator[JaggedBatch]:
        """Yield the batches left in this epoch, or all of the next one when none is left."""
        yield self.next_batch()
        while not self.at_epoch_end:
            yield self.next_batch()

    @property
    def epoch(self) -> int:
        """The epoch of the last batch used."""
        return self._used.epoch

    @property
    def at_epoch_end(self) -> bool:
        """Whether the last batch used was the last of its epoch."""
        return self._used.at_epoch_end

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch."""
        return -(-self._sampler.steps_per_epoch // self._merge)

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's state after the last batch used."""
        return dict(self._used.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Drop what was made ahead and continue with the batch that follows `state`."""
        self._drop()
        self._sampler.load_state_dict(state)
        self._used = self._position()

    def close(self) -> None:
        """Stop the thread after the batch it is making."""
        self._drop()
        self._thread.shutdown(wait=True)

    def __enter__(self) -> "PrefetchingLoader":
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def _make(self) -> LoadedBatch:
        batches = [self._sampler.next_batch()]
        while len(batches) < self._merge and not self._sampler.at_epoch_end:
            batches.append(self._sampler.next_batch())
        return LoadedBatch(merge_batches(batches), self._position())

    def _position(self) -> Position:
        return Position(self._sampler.state_dict(), self._sampler.epoch, self._sampler.at_epoch_end)

    def _drop(self) -> None:
        """Forget the batches made ahead, and wait for the one that is being made."""
        for coming in self._queue:
            coming.cancel()
        for coming in self._queue:
            if not coming.cancelled():
                coming.exception()
        self._queue.clear()
