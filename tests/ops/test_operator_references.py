"""The reference operators themselves: gradients by finite differences, values against sentences one
can check by hand.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from slipstream.ops import counter_random, losses, rows
from slipstream.ops import pointwise as neighbours


def leaf(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 7 * len(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


IDS_T = torch.tensor([3, 2**63 - 1, 0, 17, -4])


def test_gradcheck_of_neighbours():
    assert torch.autograd.gradcheck(
        neighbours.linear_silu, (leaf(5, 3), leaf(4, 3, seed=1), leaf(4))
    )
    assert torch.autograd.gradcheck(neighbours.rms_norm, (leaf(5, 4), leaf(4)))
    assert torch.autograd.gradcheck(
        lambda x: neighbours.dropout(x, p=0.4, seed=5, token_ids_T=IDS_T), (leaf(5, 6),)
    )
    for norm in ("layer", "rms"):
        assert torch.autograd.gradcheck(
            lambda x, g, w, norm=norm: neighbours.norm_gate_dropout(
                x, g, norm=norm, p=0.3, seed=9, token_ids_T=IDS_T, weight_F=w
            ),
            (leaf(5, 6), leaf(5, 6, seed=1), leaf(6)),
        )


def test_gradcheck_of_rows_and_losses():
    index_T = torch.tensor([2, 0, 2, 2, 1])
    negatives_TR = torch.tensor([[0, 1, 1], [3, 0, 2], [2, 2, 2], [1, 3, 3], [0, 0, 1]])
    log_q_T, log_q_TR, log_q_R = (
        torch.randn(5).double(),
        torch.randn(5, 3).double(),
        torch.randn(3).double(),
    )
    assert torch.autograd.gradcheck(lambda r: rows.take_rows(r, index_T), (leaf(4, 3),))
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


def test_dropout_mask_comes_from_the_named_random_numbers():
    x_TD = torch.ones(5, 33, dtype=torch.float64)
    keep = counter_random.random_uniform(11, IDS_T, 33) >= 0.25
    dropped = neighbours.dropout(x_TD, p=0.25, seed=11, token_ids_T=IDS_T)
    assert torch.equal(dropped != 0, keep) and 0.5 < keep.float().mean() < 0.95
    assert torch.equal(dropped[keep], torch.full_like(dropped[keep], 1 / 0.75))
    assert neighbours.dropout(x_TD, p=0.25, seed=None, token_ids_T=None) is x_TD
    shuffled = torch.tensor([4, 2, 0, 1, 3])
    assert torch.equal(
        neighbours.dropout(x_TD, p=0.25, seed=11, token_ids_T=IDS_T[shuffled]), dropped[shuffled]
    )


def test_norms_agree_with_torch():
    x_TD, gate_TD = leaf(4, 6).detach(), leaf(4, 6, seed=3).detach()
    layer_TD = F.layer_norm(x_TD, (6,), eps=1e-6)
    torch.testing.assert_close(neighbours.layer_norm(x_TD), layer_TD)
    torch.testing.assert_close(neighbours.norm_gate_dropout(x_TD, gate_TD), layer_TD * gate_TD)
    torch.testing.assert_close(neighbours.rms_norm(x_TD), F.rms_norm(x_TD, (6,), eps=1e-6))


def test_adagrad_by_hand():
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


def test_token_gradients_are_summed_before_the_update():
    grads_TD, rows_T = leaf(6, 3).detach(), torch.tensor([4, 1, 4, 4, 0, 1])
    rows_U, inverse_T = rows.unique_keys(rows_T)
    assert rows_U.tolist() == [0, 1, 4] and torch.equal(rows_U[inverse_T], rows_T)
    grads_UD = rows.coalesce(grads_TD, inverse_T, 3)
    torch.testing.assert_close(grads_UD[2], grads_TD[[0, 2, 3]].sum(0))
    tables = [(leaf(5, 3).detach().clone(), torch.zeros(5, dtype=torch.float64)) for _ in range(2)]
    rows.rowwise_adagrad_(*tables[0], rows_U, grads_UD, lr=0.1, eps=1e-8)
    rows.rowwise_adagrad_from_tokens_(*tables[1], rows_T, grads_TD, lr=0.1, eps=1e-8)
    for one, other in zip(*tables, strict=True):
        assert torch.equal(one, other)
