"""The optimizers of embedding rows. Touch this to add one, or to change how a row is updated.

An optimizer defines the names and shapes of its state and one in-place update. A row-wise optimizer
updates only the rows that a batch used, so the cost of a step does not depend on the table's size.
`DenseAdamW` is for small tables: its momentum and decay change every row at every step. It declares
this with `updates_untouched_rows`, because a schedule that keeps copies of rows must know.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.optim.adamw import adamw

from slipstream.errors import SlipstreamError, did_you_mean
from slipstream.ops import rows

State = dict[str, torch.Tensor]
# Makes zeros as torch.zeros(*shape, dtype=…) does; a table may pass `lazy_zeros`.
Zeros = Callable[..., torch.Tensor]


class RowOptimizer(Protocol):
    """An optimizer over the rows of one table."""

    @property
    def name(self) -> str: ...

    @property
    def updates_untouched_rows(self) -> bool:
        """Whether a step also changes rows without a gradient."""
        ...

    def new_state(
        self, num_rows: int, dim: int, dtype: torch.dtype, zeros: Zeros = torch.zeros
    ) -> State:
        """Make the state of an untrained table.

        Entries with `num_rows` rows belong to the rows; entries without an axis to the table.
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
        """Update weights and state of the rows `rows_U` (unique, ascending) in place."""
        ...


@dataclass(frozen=True)
class RowwiseAdagrad:
    """One accumulator per row: state += mean(g²), w -= lr·g / (sqrt(state) + eps)."""

    eps: float = 1e-8
    lr_factor: float = 1.0  # of the learning rate a step is given
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
        lr *= self.lr_factor
        rows.rowwise_adagrad_(weights_ND, state["sum"], rows_U, grads_UD, lr=lr, eps=self.eps)


@dataclass(frozen=True)
class RowwiseAdam:
    """Adam with a full first moment, and per row one second moment (of mean g²) and step count."""

    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-8
    lr_factor: float = 1.0  # of the learning rate a step is given
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
        lr *= self.lr_factor
        rows.rowwise_adam_(
            weights_ND, m, v, steps, rows_U, grads_UD, lr=lr, betas=self.betas, eps=self.eps
        )


@dataclass(frozen=True)
class DenseAdamW:
    """torch's AdamW over the whole table; it also changes rows that have no gradient."""

    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-8
    weight_decay: float = 0.0
    lr_factor: float = 1.0  # of the learning rate a step is given
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
                lr=lr * self.lr_factor,
                weight_decay=self.weight_decay,
                eps=self.eps,
                maximize=False,
            )


def make_row_optimizer(
    name: str,
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float = 0.0,
    lr_factor: float = 1.0,
) -> RowOptimizer:
    """Make the optimizer that a recipe names in `tables.optimizer`."""
    if name == "rowwise_adagrad":
        return RowwiseAdagrad(eps=eps, lr_factor=lr_factor)
    if name == "rowwise_adam":
        return RowwiseAdam(betas=betas, eps=eps, lr_factor=lr_factor)
    if name == "adamw":
        return DenseAdamW(betas=betas, eps=eps, weight_decay=weight_decay, lr_factor=lr_factor)
    raise SlipstreamError(
        "unknown table optimizer "
        f"'{name}'{did_you_mean(name, ('rowwise_adagrad', 'rowwise_adam', 'adamw'))}"
    )
