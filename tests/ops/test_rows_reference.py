"""The reference row operators: gradients by finite differences, updates one can check by hand."""

import math

import torch

from slipstream.ops import rows
from tests.support.operator_parity import leaf


def test_gradients_of_take_rows_are_those_of_finite_differences():
    index_T = torch.tensor([2, 0, 2, 2, 1])
    assert torch.autograd.gradcheck(lambda r: rows.take_rows(r, index_T), (leaf(4, 3),))


def test_an_adagrad_step_by_hand():
    weights_ND, state_N = (
        torch.zeros(3, 2, dtype=torch.float64),
        torch.tensor([0.0, 1.0, 5.0], dtype=torch.float64),
    )
    grads_UD = torch.tensor([[3.0, 1.0]], dtype=torch.float64)
    rows.rowwise_adagrad_(weights_ND, state_N, torch.tensor([1]), grads_UD, lr=0.5, eps=0.0)
    assert state_N.tolist() == [0.0, 6.0, 5.0]
    torch.testing.assert_close(weights_ND[1], -0.5 * grads_UD[0] / math.sqrt(6.0))
    assert not weights_ND[[0, 2]].any()


def test_adam_counts_steps_per_row():
    weights_ND, m_ND = (
        torch.zeros(3, 2, dtype=torch.float64),
        torch.zeros(3, 2, dtype=torch.float64),
    )
    v_N, steps_N = torch.zeros(3, dtype=torch.float64), torch.tensor([0, 4, 0])
    grads_UD = torch.tensor([[2.0, 2.0], [2.0, 2.0]], dtype=torch.float64)
    rows.rowwise_adam_(
        weights_ND,
        m_ND,
        v_N,
        steps_N,
        torch.tensor([0, 1]),
        grads_UD,
        lr=0.1,
        betas=(0.9, 0.99),
        eps=0.0,
    )
    assert steps_N.tolist() == [1, 5, 0]
    torch.testing.assert_close(
        weights_ND[0], torch.full((2,), -0.1, dtype=torch.float64)
    )  # a first step has size lr
    m_hat, v_hat = 0.2 / (1 - 0.9**5), 0.04 / (1 - 0.99**5)
    torch.testing.assert_close(
        weights_ND[1], torch.full((2,), -0.1 * m_hat / math.sqrt(v_hat), dtype=torch.float64)
    )
    assert not weights_ND[2].any() and not m_ND[2].any()


def test_coalesce_sums_the_gradients_of_each_row():
    grads_TD, rows_T = leaf(6, 3).detach(), torch.tensor([4, 1, 4, 4, 0, 1])
    rows_U, inverse_T = rows.unique_keys(rows_T)
    assert rows_U.tolist() == [0, 1, 4] and torch.equal(rows_U[inverse_T], rows_T)
    grads_UD = rows.coalesce(grads_TD, inverse_T, 3)
    torch.testing.assert_close(grads_UD[2], grads_TD[[0, 2, 3]].sum(0))
