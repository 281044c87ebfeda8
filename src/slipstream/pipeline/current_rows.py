"""The newest rows of one table while steps are in flight: in a step's buffer, else in the table.

A step may read and update rows that are not in its buffer, such as negatives in segments. It reads
them here: step t sees every update through step t-1, because the newest of the buffers t-b … t that
holds a key is current, and what no such buffer holds was written back before the rows of t were
retrieved (`hazards.py` proves both from the schedule's order). An update goes to the buffer of t
where that holds the key. Elsewhere it goes to the table and to every other buffer that holds the
key, so that no later copy or write-back brings an older row. Touch this when rows are read or
updated outside the buffers in another way.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from slipstream.pipeline.buffers import RowBuffer
from slipstream.pipeline.hazards import sources
from slipstream.tables.embedding_table import EmbeddingTable, Rows


class RowSource(Protocol):
    """Where rows are read and updated: a table, or a schedule's buffers before it."""

    def gather(self, keys_U: torch.Tensor) -> torch.Tensor:
        """Copy the weights of these rows."""
        ...

    def apply(self, keys_U: torch.Tensor, grads_UD: torch.Tensor, lr: float) -> None:
        """Take one optimiser step of these rows."""
        ...


class CurrentRows:
    """Reads and updates rows of `table` at step `step`.

    `buffers()` returns the table's buffers by step; `hold()` keeps the table lane away meanwhile.
    """

    def __init__(
        self,
        table: EmbeddingTable,
        buffers: Callable[[], dict[int, RowBuffer]],
        hold: Callable[[], AbstractContextManager[None]],
        buffers_ahead: Callable[[], int],
    ) -> None:
        self.table, self.step = table, 0
        self._buffers, self._hold, self._ahead = buffers, hold, buffers_ahead

    def gather(self, keys_U: torch.Tensor) -> torch.Tensor:
        """Copy the newest weights of these rows; the keys are unique and ascending."""
        with self._hold():
            holders = self._holders()
            origin = sources(keys_U, {step: held.keys_U for step, held in holders.items()})
            if not origin.copies:
                return self.table.gather(keys_U)
            weights_UD = torch.empty(keys_U.numel(), self.table.dim, dtype=self.table.dtype)
            weights_UD[origin.rest_R] = self.table.gather(keys_U[origin.rest_R])
            for step, there_C, here_C in origin.copies:
                weights_UD[here_C] = holders[step].weights_UD[there_C]
            return weights_UD

    def apply(self, keys_U: torch.Tensor, grads_UD: torch.Tensor, lr: float) -> None:
        """Take one optimiser step of these rows; the keys are unique and ascending."""
        with self._hold():
            holders = self._holders()
            origin = sources(keys_U, {step: held.keys_U for step, held in holders.items()})
            rows = RowBuffer.from_table(
                keys_U, origin.rest_R, self.table.read(keys_U[origin.rest_R])
            )
            rows.copy_from(origin, holders)
            rows.update(self.table.optimizer, grads_UD, lr)
            own = holders[self.step]
            kept = sources(keys_U, {self.step: own.keys_U})
            for _, there_C, here_C in kept.copies:
                own.copy_rows(rows, here_C, there_C)
            outside_R = kept.rest_R
            self.table.write(keys_U[outside_R], _take(rows, outside_R))
            for buffer in self._others():
                for _, there_C, here_C in sources(buffer.keys_U, {0: keys_U[outside_R]}).copies:
                    buffer.copy_rows(rows, outside_R[there_C], here_C)

    def _others(self) -> list[RowBuffer]:
        """Return the buffers of all other steps in flight."""
        return [held for step, held in self._buffers().items() if step != self.step]

    def _holders(self) -> dict[int, RowBuffer]:
        """Return the buffers that may hold rows newer than the table's."""
        oldest = self.step - self._ahead()
        return {step: held for step, held in self._buffers().items() if oldest <= step <= self.step}


def _take(rows: RowBuffer, places_R: torch.Tensor) -> Rows:
    return Rows(
        rows.weights_UD[places_R], {name: value[places_R] for name, value in rows.state.items()}
    )
