"""Row operators of embedding tables: unique keys, gather, gradient sums, row-wise optimisers.

A batch names the same key many times. `unique_keys` finds the distinct ones, `take_rows` spreads
their rows over the tokens (its backward sums in a fixed order, without atomics), `coalesce` sums
the gradients of each row, and the optimisers update each row once. Touch this when a table needs
another operation on rows.
"""

import torch

from slipstream.ops import backend as backends
from slipstream.ops import operand_checks, rows_native, rows_reference


def unique_keys(
    keys_T: torch.Tensor, *, backend: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(unique_U sorted ascending, inverse_T) of int64 keys: unique_U[inverse_T] == keys_T."""
    operand_checks.integers("keys", keys_T, shape=(None,))
    serve = (
        rows_native
        if backends.choose(backend, keys_T.new_empty(0, dtype=torch.float32)) == "native"
        else rows_reference
    )
    found: tuple[torch.Tensor, torch.Tensor] = serve.unique_keys(keys_T)
    return found


def take_rows(
    rows_UD: torch.Tensor, index_T: torch.Tensor, *, backend: str | None = None
) -> torch.Tensor:
    """rows_UD[index_T]; differentiable, backward sums each row's gradients in a fixed order."""
    operand_checks.floating("rows", rows_UD, dims=2)
    operand_checks.index("index", index_T, rows_UD.shape[0], shape=(None,), device=rows_UD.device)
    serve = rows_native if backends.choose(backend, rows_UD) == "native" else rows_reference
    taken_TD: torch.Tensor = serve.take_rows(rows_UD, index_T)
    return taken_TD


def coalesce(
    grads_TD: torch.Tensor, inverse_T: torch.Tensor, num_unique: int, *, backend: str | None = None
) -> torch.Tensor:
    """[num_unique, D]: the sum of the token gradients that share a place in `inverse_T`."""
    operand_checks.floating("grads", grads_TD, dims=2)
    operand_checks.not_negative("num_unique", num_unique)
    operand_checks.index(
        "inverse", inverse_T, num_unique, shape=(grads_TD.shape[0],), device=grads_TD.device
    )
    serve = rows_native if backends.choose(backend, grads_TD) == "native" else rows_reference
    sums_UD: torch.Tensor = serve.coalesce(grads_TD, inverse_T, num_unique)
    return sums_UD


@torch.no_grad()
def rowwise_adagrad_(
    weights_ND: torch.Tensor,
    state_N: torch.Tensor,
    rows_U: torch.Tensor,
    grads_UD: torch.Tensor,
    *,
    lr: float,
    eps: float,
    backend: str | None = None,
) -> None:
    """state += mean_d(g^2); w -= lr * g / (sqrt(state) + eps), in place; each row at most once."""
    _check_table(weights_ND, rows_U, grads_UD)
    operand_checks.like("state", state_N, "weights", weights_ND, (weights_ND.shape[0],))
    _check_once(rows_U)
    serve = rows_native if _updates_natively(backend, weights_ND, state_N) else rows_reference
    serve.rowwise_adagrad_(weights_ND, state_N, rows_U, grads_UD, lr, eps)


@torch.no_grad()
def rowwise_adam_(
    weights_ND: torch.Tensor,
    m_ND: torch.Tensor,
    v_N: torch.Tensor,
    steps_N: torch.Tensor,
    rows_U: torch.Tensor,
    grads_UD: torch.Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    backend: str | None = None,
) -> None:
    """Adam with one second moment and step count per row, in place; each row at most once."""
    _check_table(weights_ND, rows_U, grads_UD)
    operand_checks.like("m", m_ND, "weights", weights_ND, tuple(weights_ND.shape))
    operand_checks.like("v", v_N, "weights", weights_ND, (weights_ND.shape[0],))
    operand_checks.integers(
        "steps", steps_N, shape=(weights_ND.shape[0],), device=weights_ND.device
    )
    _check_betas(betas)
    _check_once(rows_U)
    serve = (
        rows_native
        if _updates_natively(backend, weights_ND, m_ND, v_N, steps_N)
        else rows_reference
    )
    serve.rowwise_adam_(weights_ND, m_ND, v_N, steps_N, rows_U, grads_UD, lr, betas, eps)


def _check_table(weights_ND: torch.Tensor, rows_U: torch.Tensor, grads_UD: torch.Tensor) -> None:
    operand_checks.floating("weights", weights_ND, dims=2)
    operand_checks.index(
        "rows", rows_U, weights_ND.shape[0], shape=(None,), device=weights_ND.device
    )
    operand_checks.like(
        "grads", grads_UD, "weights", weights_ND, (rows_U.shape[0], weights_ND.shape[1])
    )


def _check_betas(betas: tuple[float, float]) -> None:
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"betas must be two numbers, each at least 0 and below 1, got {betas}")


def _check_once(rows_U: torch.Tensor) -> None:
    """Refuse a row that stands twice; ascending rows (of unique_keys) need one cheap comparison."""
    ascending = rows_U.numel() < 2 or bool((rows_U[1:] > rows_U[:-1]).all())
    if not ascending and torch.unique(rows_U).numel() != rows_U.numel():
        raise ValueError(
            "rows holds the same row twice; sum its gradients first (unique_keys and coalesce)"
        )


def _updates_natively(backend: str | None, *tensors: torch.Tensor) -> bool:
    """Whether the kernels can update in place; a table with gaps is left to the reference."""
    return backends.choose(backend, tensors[0]) == "native" and all(
        tensor.is_contiguous() for tensor in tensors
    )
