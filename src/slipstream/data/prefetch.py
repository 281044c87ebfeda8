"""Makes the next batches in a thread while the caller computes, so that cutting windows and
balancing ranks cost no step time.

The batches are the sampler's own, in its order; the state is that of what has been *handed out*, so
a resumed run repeats what was made but never used.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from slipstream.data.batch import JaggedBatch
from slipstream.data.sampler import TrainingSampler


@dataclass(frozen=True)
class _Made:
    """A batch, and where its sampler stood after it."""

    batch: JaggedBatch
    state: dict[str, Any]
    epoch: int
    at_epoch_end: bool


class PrefetchingSampler:
    """A `TrainingSampler` that works ahead by at most `ahead` batches. Close it, or use it as a
    context manager.
    """

    def __init__(self, sampler: TrainingSampler, ahead: int = 2) -> None:
        if ahead < 1:
            raise ValueError(f"a prefetching sampler works at least one batch ahead, got {ahead}")
        self._sampler, self._ahead = sampler, ahead
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="slipstream-sampler")
        self._queue: deque[Future[_Made]] = deque()
        self._stand_at_sampler()

    def _stand_at_sampler(self) -> None:
        self._state = self._sampler.state_dict()
        self.epoch, self.at_epoch_end = self._sampler.epoch, self._sampler.at_epoch_end

    def _make(self) -> _Made:
        batch = self._sampler.next_batch()
        return _Made(
            batch, self._sampler.state_dict(), self._sampler.epoch, self._sampler.at_epoch_end
        )

    def next_batch(self) -> JaggedBatch:
        """The next batch of the sampler; whatever it raises is raised here."""
        while len(self._queue) <= self._ahead:
            self._queue.append(self._worker.submit(self._make))
        made = self._queue.popleft().result()
        self._state, self.epoch, self.at_epoch_end = made.state, made.epoch, made.at_epoch_end
        return made.batch

    def epoch_batches(self) -> Iterator[JaggedBatch]:
        """The batches left in this epoch, or all of the next one when none is left."""
        yield self.next_batch()
        while not self.at_epoch_end:
            yield self.next_batch()

    @property
    def steps_per_epoch(self) -> int:
        return self._sampler.steps_per_epoch

    def state_dict(self) -> dict[str, Any]:
        """Where the consumer stands: what is made ahead does not count."""
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Forget what was made ahead and go on with the very next sample of `state`."""
        self._drain()
        self._sampler.load_state_dict(state)
        self._stand_at_sampler()

    def _drain(self) -> None:
        for made in self._queue:
            made.cancel()
        for made in self._queue:
            if not made.cancelled():
                made.exception()
        self._queue.clear()

    def close(self) -> None:
        """Stop the thread."""
        self._drain()
        self._worker.shutdown(wait=True)

    def __enter__(self) -> "PrefetchingSampler":
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()
