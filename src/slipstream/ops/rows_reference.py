"""The row operators in plain PyTorch; the compiled ones are tested against it.

Sums run in token order, so they are deterministic on a CPU. Touch this only when what an operator
computes changes.
"""

import torch


def unique_keys(keys_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorted unique keys, and for each key its place among them."""
    unique_U, inverse_T = torch.unique(keys_T, sorted=True, return_inverse=True)
    return unique_U, inverse_T


def take_rows(rows_UD: torch.Tensor, index_T: torch.Tensor) -> torch.Tensor:
    """rows[index]; its backward is torch's index_add, in token order."""
    return rows_UD.index_select(0, index_T)


def coalesce(grads_TD: torch.Tensor, inverse_T: torch.Tensor, num_unique: int) -> torch.Tensor:
    """The sum of the gradients that share a place."""
    return grads_TD.new_zeros(num_unique, grads_TD.shape[1]).index_add_(0, inverse_T, grads_TD)


def rowwise_adagrad_(
    weights_ND: torch.Tensor,
    state_N: torch.Tensor,
    rows_U: torch.Tensor,
    grads_UD: torch.Tensor,
    lr: float,
    eps: float,
) -> None:
    """One Adagrad step of the given rows, with one accumulator per row."""
    state_U = state_N[rows_U] + grads_UD.square().mean(dim=1)
    state_N[rows_U] = state_U
    weights_ND[rows_U] -= lr * grads_UD / (state_U.sqrt() + eps).unsqueeze(1)


def rowwise_adam_(
    weights_ND: torch.Tensor,
    m_ND: torch.Tensor,
    v_N: torch.Tensor,
    steps_N: torch.Tensor,
    rows_U: torch.Tensor,
    grads_UD: torch.Tensor,
    lr: float,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """One Adam step of the given rows: a first moment per value, one second moment per row."""
    beta1, beta2 = betas
    steps_U = steps_N[rows_U] + 1
    m_UD = beta1 * m_ND[rows_U] + (1 - beta1) * grads_UD
    v_U = beta2 * v_N[rows_U] + (1 - beta2) * grads_UD.square().mean(dim=1)
    steps_N[rows_U], m_ND[rows_U], v_N[rows_U] = steps_U, m_UD, v_U
    exact_U = steps_U.to(torch.float64)
    correction1_U = (1 - torch.pow(beta1, exact_U)).to(m_UD.dtype)
    correction2_U = (1 - torch.pow(beta2, exact_U)).to(m_UD.dtype)
    scale_U = lr / (((v_U / correction2_U).sqrt() + eps) * correction1_U)
    weights_ND[rows_U] -= scale_U.unsqueeze(1) * m_UD
