"""The rows of one step at their owner: weights and state, read, updated and written back.

While step t computes from its buffer, the buffer of step t+1 fills. Rows that t is about to update
are not read from the tables for t+1: they are copied over, state included, once t has updated them.
Touch this when a row gets more state, or when what a step reads differs from what it updates.
"""

from collections.abc import Mapping

import torch

from slipstream.pipeline.hazards import Sources, sources
from slipstream.tables.embedding_table import Rows
from slipstream.tables.row_optimizers import RowOptimizer, State


class RowBuffer:
    """Rows of one table for one step, by unique ascending keys."""

    def __init__(self, keys_U: torch.Tensor, weights_UD: torch.Tensor, state: State) -> None:
        self.keys_U, self.weights_UD, self.state = keys_U, weights_UD, state
        self._older_UD: torch.Tensor | None = None  # what `read` returns where that is older

    @classmethod
    def from_table(cls, keys_U: torch.Tensor, rest_R: torch.Tensor, rows: Rows) -> "RowBuffer":
        """Make a buffer from a table's rows at the places `rest_R`; the others are copied later."""
        if rest_R.numel() == keys_U.numel():
            return cls(keys_U, rows.weights_UD, dict(rows.state))

        def spread(value_R: torch.Tensor) -> torch.Tensor:
            return value_R.new_empty((keys_U.numel(), *value_R.shape[1:])).index_copy_(
                0, rest_R, value_R
            )

        return cls(
            keys_U,
            spread(rows.weights_UD),
            {name: spread(value) for name, value in rows.state.items()},
        )

    def copy_rows(self, other: "RowBuffer", there_C: torch.Tensor, here_C: torch.Tensor) -> None:
        """Copy rows of another buffer, weights and state."""
        self.weights_UD.index_copy_(0, here_C, other.weights_UD.index_select(0, there_C))
        self.copy_state(other, there_C, here_C)

    def copy_state(self, other: "RowBuffer", there_C: torch.Tensor, here_C: torch.Tensor) -> None:
        """Copy the optimiser state of another buffer's rows."""
        for name, value in self.state.items():
            value.index_copy_(0, here_C, other.state[name].index_select(0, there_C))

    def copy_from(self, origin: Sources, buffers: Mapping[int, "RowBuffer"]) -> None:
        """Copy every row that an earlier buffer holds."""
        for step, there_C, here_C in origin.copies:
            self.copy_rows(buffers[step], there_C, here_C)

    def read_older(self, keys_H: torch.Tensor, weights_HD: torch.Tensor) -> None:
        """Let `read` return these weights for these keys; `update` still starts from the newest.

        The keys are unique and ascending; those that are not in this buffer are left out.
        """
        older_UD = self.weights_UD.clone() if self._older_UD is None else self._older_UD
        for _, there_C, here_C in sources(self.keys_U, {0: keys_H}).copies:
            older_UD.index_copy_(0, here_C, weights_HD.index_select(0, there_C))
        self._older_UD = older_UD

    def read(self, places_O: torch.Tensor) -> torch.Tensor:
        """Return a copy of the weights at these places."""
        weights_UD = self.weights_UD if self._older_UD is None else self._older_UD
        return weights_UD.index_select(0, places_O)

    def update(self, optimizer: RowOptimizer, grads_UD: torch.Tensor, lr: float) -> None:
        """Take one optimiser step of all rows."""
        optimizer.update_(
            self.weights_UD, self.state, torch.arange(self.keys_U.numel()), grads_UD, lr
        )

    def rows(self) -> Rows:
        """Return the rows as tables take them."""
        return Rows(self.weights_UD, self.state)
