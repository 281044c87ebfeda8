"""The sampler as the loop of a scheduled run sees it: batches are made ahead, the position is that
of the steps done.
"""

from dataclasses import dataclass
from typing import Any

from slipstream.data.batch import JaggedBatch
from slipstream.data.sampler import TrainingSampler


@dataclass(frozen=True)
class Position:
    """Where a sampler stood after a batch."""

    state: dict[str, Any]
    epoch: int
    at_epoch_end: bool


class HandedOut(TrainingSampler):
    """A sampler that runs ahead in the loader lane and stands, for everybody else, at the last
    batch a finished step used.
    """

    def __init__(self, sampler: TrainingSampler) -> None:
        self._sampler = sampler
        self._stands = self._position()

    def _position(self) -> Position:
        return Position(self._sampler.state_dict(), self._sampler.epoch, self._sampler.at_epoch_end)

    def take(self) -> tuple[JaggedBatch, Position]:
        """Loader lane: the next batch, and where its sampler stood after it."""
        batch = self._sampler.next_batch()
        return batch, self._position()

    def hand_out(self, position: Position) -> None:
        """A step has used the batch made at `position`."""
        self._stands = position

    @property
    def epoch(self) -> int:  # type: ignore[override]
        return self._stands.epoch

    @property
    def at_epoch_end(self) -> bool:
        return self._stands.at_epoch_end

    @property
    def steps_per_epoch(self) -> int:  # type: ignore[override]
        return self._sampler.steps_per_epoch

    def next_batch(self) -> JaggedBatch:
        """The next batch, used at once."""
        batch, position = self.take()
        self.hand_out(position)
        return batch

    def state_dict(self) -> dict[str, Any]:
        return dict(self._stands.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sampler.load_state_dict(state)
        self._stands = self._position()
