"""The reference losses: gradients by finite differences, values one can check by hand."""

import math

import pytest
import torch
import torch.nn.functional as F

from slipstream.ops import losses
from tests.support.operator_parity import leaf


def test_gradients_are_those_of_finite_differences():
    index_T = torch.tensor([2, 0, 2, 2, 1])
    negatives_TR = torch.tensor([[0, 1, 1], [3, 0, 2], [2, 2, 2], [1, 3, 3], [0, 0, 1]])
    log_q_T, log_q_TR, log_q_R = (
        torch.randn(5).double(),
        torch.randn(5, 3).double(),
        torch.randn(3).double(),
    )
    hidden_TD, rows_UD = leaf(5, 3), leaf(4, 3, seed=1)
    assert torch.autograd.gradcheck(
        lambda h, r: losses.sampled_softmax_loss(
            h,
            r,
            index_T,
            negatives_TR,
            temperature=0.5,
            target_log_q_T=log_q_T,
            negative_log_q_TR=log_q_TR,
        ),
        (hidden_TD, rows_UD),
    )
    assert torch.autograd.gradcheck(
        lambda h, r: losses.shared_softmax_loss(
            h,
            r,
            index_T,
            negatives_TR[1],
            temperature=0.5,
            target_log_q_T=log_q_T,
            negative_log_q_R=log_q_R,
        ),
        (hidden_TD, rows_UD),
    )
    assert torch.autograd.gradcheck(
        lambda h, r: losses.full_softmax_loss(h, r, index_T, temperature=0.5), (hidden_TD, rows_UD)
    )


def test_full_softmax_is_cross_entropy_and_the_sampled_ones_with_all_negatives_agree():
    hidden_TD, rows_UD, targets_T = (
        leaf(6, 5).detach(),
        leaf(7, 5).detach(),
        torch.tensor([0, 6, 3, 3, 2, 5]),
    )
    expected_T = F.cross_entropy(hidden_TD @ rows_UD.T / 0.3, targets_T, reduction="none")
    everything_R = torch.arange(7)
    sampled_T = losses.sampled_softmax_loss(
        hidden_TD, rows_UD, targets_T, everything_R.expand(6, 7), temperature=0.3
    )
    shared_T = losses.shared_softmax_loss(
        hidden_TD, rows_UD, targets_T, everything_R, temperature=0.3
    )
    full_T = losses.full_softmax_loss(hidden_TD, rows_UD, targets_T, temperature=0.3)
    for loss_T in (sampled_T, shared_T, full_T):
        torch.testing.assert_close(loss_T, expected_T)


def test_no_negatives_or_only_the_target_cost_nothing():
    hidden_TD, rows_UD, targets_T = (
        leaf(3, 4).detach(),
        leaf(2, 4).detach(),
        torch.tensor([0, 1, 1]),
    )
    none_TR, same_TR = torch.zeros(3, 0, dtype=torch.int64), targets_T.unsqueeze(1).expand(3, 5)
    for negatives_TR in (none_TR, same_TR):
        assert (
            losses.sampled_softmax_loss(hidden_TD, rows_UD, targets_T, negatives_TR).abs().max()
            < 1e-12
        )


def test_log_q_lowers_a_logit():
    hidden_TD, rows_UD = (
        torch.ones(1, 1, dtype=torch.float64),
        torch.tensor([[0.0], [0.0]], dtype=torch.float64),
    )
    log_q_TR = torch.tensor([[math.log(0.25)]], dtype=torch.float64)
    loss_T = losses.sampled_softmax_loss(
        hidden_TD, rows_UD, torch.tensor([0]), torch.tensor([[1]]), negative_log_q_TR=log_q_TR
    )
    assert loss_T.item() == pytest.approx(math.log(1 + 4))
