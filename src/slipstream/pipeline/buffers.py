"""The rows of one step at their owner: weights and optimiser state together, lent, moved and
written back from here.

While step t computes from its (active) buffer, the (prefetch) buffer of step t+1 fills. Rows that t
is about to move are not even read for t+1: they are copied over, state and all, once t has moved
them.
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
        self._lent_UD: torch.Tensor | None = (
            None  # where other weights are lent than those that will be moved
        )

    @classmethod
    def retrieved(cls, keys_U: torch.Tensor, rest_R: torch.Tensor, rows: Rows) -> "RowBuffer":
        """A buffer whose rows at the places `rest_R` came from a table; the others are still to be
        copied.
        """
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
        """Take over rows of another buffer, weights and state."""
        self.weights_UD.index_copy_(0, here_C, other.weights_UD.index_select(0, there_C))
        self.copy_state(other, there_C, here_C)

    def copy_state(self, other: "RowBuffer", there_C: torch.Tensor, here_C: torch.Tensor) -> None:
        for name, value in self.state.items():
            value.index_copy_(0, here_C, other.state[name].index_select(0, there_C))

    def copy_from(self, origin: Sources, buffers: Mapping[int, "RowBuffer"]) -> None:
        """Take over every row an earlier buffer holds."""
        for step, there_C, here_C in origin.copies:
            self.copy_rows(buffers[step], there_C, here_C)

    def lend_older(self, keys_H: torch.Tensor, weights_HD: torch.Tensor) -> None:
        """Lend these weights for these keys (unique, ascending) where they are here, though newer
        ones will be moved.
        """
        lent_UD = self.weights_UD.clone() if self._lent_UD is None else self._lent_UD
        for _, there_C, here_C in sources(self.keys_U, {0: keys_H}).copies:
            lent_UD.index_copy_(0, here_C, weights_HD.index_select(0, there_C))
        self._lent_UD = lent_UD

    def lend(self, places_O: torch.Tensor) -> torch.Tensor:
        """A copy of the weights at these places."""
        return (self.weights_UD if self._lent_UD is None else self._lent_UD).index_select(
            0, places_O
        )

    def move(self, optimizer: RowOptimizer, grads_UD: torch.Tensor, lr: float) -> None:
        """One optimiser step of all rows."""
        optimizer.update_(
            self.weights_UD, self.state, torch.arange(self.keys_U.numel()), grads_UD, lr
        )

    def rows(self) -> Rows:
        return Rows(self.weights_UD, self.state)
