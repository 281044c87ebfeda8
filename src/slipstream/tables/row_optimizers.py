"""How a row moves: the optimiser optimizers of embedding tables.

A optimizer owns the names and shapes of its state and one in-place update. Row-wise optimizers
touch only the rows a batch used, so a step costs what the batch costs, not what the table weighs.
`AdamW` is the dense optimizer for small tables: its momentum and decay move every row at every
step, and it says so (`updates_untouched_rows`), because a schedule that keeps rows elsewhere must
know.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.optim.adamw import adamw

from slipstream.errors import SlipstreamError, did_you_mean
from slipstream.ops import rows

State = dict[str, torch.Tensor]
Zeros = Callable[
    ..., torch.Tensor
]  # makes zeros like torch.zeros(*shape, dtype=…); a tier may give pages that cost nothing yet


class RowOptimizer(Protocol):
    """An optimiser optimizer over the rows of one table."""

    @property
    def name(self) -> str: ...

    @property
    def updates_untouched_rows(self) -> bool: ...

    def new_state(
        self, num_rows: int, dim: int, dtype: torch.dtype, zeros: Zeros = torch.zeros
    ) -> State:
        """State of an untrained table. Entries with `num_rows` rows travel with their rows; others
        are the table's own.
        """
        ...

    def update_(
        self,
        weights_ND: torch.Tensor,
        state: State,
        rows_U: torch.Tensor,
        grads_UD: torch.Tensor,
        lr: float,
    ) -> None:
        """Move the rows `rows_U` (unique, ascending) by their gradients, in place, weights and
        state together.
        """
        ...


@dataclass(frozen=True)
class RowwiseAdagrad:
    """One accumulator per row: state += mean(g²), w -= lr·g / (sqrt(state) + eps)."""

    eps: float = 1e-8
    name: str = "rowwise_adagrad"
    updates_untouched_rows: bool = False

    def new_state(
        self, num_rows: int, dim: int, dtype: torch.dtype, zeros: Zeros = torch.zeros
    ) -> State:
        return {"sum": zeros(num_rows, dtype=dtype)}

    def update_(
        self,
        weights_ND: torch.Tensor,
        state: State,
        rows_U: torch.Tensor,
        grads_UD: torch.Tensor,
        lr: float,
    ) -> None:
        rows.rowwise_adagrad_(weights_ND, state["sum"], rows_U, grads_UD, lr=lr, eps=self.eps)


@dataclass(frozen=True)
class RowwiseAdam:
    """Adam with a full first moment, one second moment per row (over mean g²), and each row's own
    step count.
    """

    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-8
    name: str = "rowwise_adam"
    updates_untouched_rows: bool = False

    def new_state(
        self, num_rows: int, dim: int, dtype: torch.dtype, zeros: Zeros = torch.zeros
    ) -> State:
        return {
            "m": zeros(num_rows, dim, dtype=dtype),
            "v": zeros(num_rows, dtype=dtype),
            "steps": zeros(num_rows, dtype=torch.int64),
        }

    def update_(
        self,
        weights_ND: torch.Tensor,
        state: State,
        rows_U: torch.Tensor,
        grads_UD: torch.Tensor,
        lr: float,
    ) -> None:
        m, v, steps = state["m"], state["v"], state["steps"]
        rows.rowwise_adam_(
            weights_ND, m, v, steps, rows_U, grads_UD, lr=lr, betas=self.betas, eps=self.eps
        )


@dataclass(frozen=True)
class DenseAdamW:
    """torch's AdamW over the whole table: rows without a gradient still decay and still follow
    their momentum.
    """

    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-8
    weight_decay: float = 0.0
    name: str = "adamw"
    updates_untouched_rows: bool = True

    def new_state(
        self, num_rows: int, dim: int, dtype: torch.dtype, zeros: Zeros = torch.zeros
    ) -> State:
        moments = {name: zeros(num_rows, dim, dtype=dtype) for name in ("m", "v")}
        return {**moments, "step": torch.zeros((), dtype=torch.float32)}

    def update_(
        self,
        weights_ND: torch.Tensor,
        state: State,
        rows_U: torch.Tensor,
        grads_UD: torch.Tensor,
        lr: float,
    ) -> None:
        if rows_U.numel() != len(weights_ND):
            grads_UD = torch.zeros_like(weights_ND).index_copy_(0, rows_U, grads_UD)
        with torch.no_grad():
            adamw(
                [weights_ND],
                [grads_UD],
                [state["m"]],
                [state["v"]],
                [],
                [state["step"]],
                fused=True,
                amsgrad=False,
                beta1=self.betas[0],
                beta2=self.betas[1],
                lr=lr,
                weight_decay=self.weight_decay,
                eps=self.eps,
                maximize=False,
            )


def make_row_optimizer(
    name: str, *, betas: tuple[float, float], eps: float, weight_decay: float = 0.0
) -> RowOptimizer:
    """The optimizer a recipe names."""
    if name == "rowwise_adagrad":
        return RowwiseAdagrad(eps=eps)
    if name == "rowwise_adam":
        return RowwiseAdam(betas=betas, eps=eps)
    if name == "adamw":
        return DenseAdamW(betas=betas, eps=eps, weight_decay=weight_decay)
    raise SlipstreamError(
        "unknown table optimizer "
        f"'{name}'{did_you_mean(name, ('rowwise_adagrad', 'rowwise_adam', 'adamw'))}"
    )
