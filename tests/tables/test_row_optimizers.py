"""Each optimizer updates the rows it should, as its formula says."""

import pytest
import torch

from slipstream.errors import SlipstreamError
from slipstream.tables.row_optimizers import (
    DenseAdamW,
    RowwiseAdagrad,
    RowwiseAdam,
    make_row_optimizer,
)
from tests.support.table_samples import OPTIMIZERS, small_table


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.name)
def test_untouched_rows_change_only_under_an_optimizer_that_declares_it(optimizer):
    one = small_table(optimizer)
    keys, grads = torch.tensor([1, 4]), torch.randn(2, 3, dtype=torch.float64)
    one.apply(torch.tensor([2]), torch.ones(1, 3, dtype=torch.float64), 0.1)
    before = one.weights_ND.clone()
    one.apply(keys, grads, 0.1)
    changed = (one.weights_ND != before).any(1)
    assert changed[keys].all()
    assert bool(changed[2]) == optimizer.updates_untouched_rows


def test_dense_adamw_equals_that_of_torch():
    one = small_table(DenseAdamW(betas=(0.9, 0.98), weight_decay=0.1))
    embedding = torch.nn.Embedding.from_pretrained(one.weights_ND.clone(), freeze=False)
    optimizer = torch.optim.AdamW(
        embedding.parameters(), lr=0.01, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.1
    )
    for step in range(4):
        keys = torch.tensor([[0, 2, 3], [1, 2, 5], [0, 1, 6], [4, 5, 6]][step])
        weights = torch.randn(
            3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(step)
        )
        optimizer.zero_grad()
        (embedding(keys) * weights).sum().backward()
        optimizer.step()
        one.apply(keys, weights, 0.01)
    assert torch.allclose(one.weights_ND, embedding.weight, rtol=1e-12, atol=1e-14)


def test_rowwise_optimizers_follow_their_written_out_formulas():
    adagrad, adam = (
        small_table(RowwiseAdagrad(eps=1e-6)),
        small_table(RowwiseAdam(betas=(0.8, 0.9), eps=1e-6)),
    )
    start = adagrad.weights_ND[2].clone()
    g1, g2 = (
        torch.tensor([[1.0, 2, 3]], dtype=torch.float64),
        torch.tensor([[-1.0, 0, 2]], dtype=torch.float64),
    )
    for grads in (g1, g2):
        adagrad.apply(torch.tensor([2]), grads, 0.1)
        adam.apply(torch.tensor([2]), grads, 0.1)
    sum1, sum2 = 14 / 3, 14 / 3 + 5 / 3
    expected = start - 0.1 * g1[0] / (sum1**0.5 + 1e-6) - 0.1 * g2[0] / (sum2**0.5 + 1e-6)
    assert torch.allclose(adagrad.weights_ND[2], expected, rtol=1e-12)
    m1, v1 = 0.2 * g1[0], 0.1 * 14 / 3
    m2, v2 = 0.8 * m1 + 0.2 * g2[0], 0.9 * v1 + 0.1 * 5 / 3
    expected = start - 0.1 * (m1 / 0.2) / ((v1 / 0.1) ** 0.5 + 1e-6)
    expected = expected - 0.1 * (m2 / (1 - 0.64)) / ((v2 / (1 - 0.81)) ** 0.5 + 1e-6)
    assert torch.allclose(adam.weights_ND[2], expected, rtol=1e-10)


def test_an_unknown_optimizer_is_refused_with_a_guess():
    with pytest.raises(SlipstreamError, match="did you mean 'rowwise_adam'"):
        make_row_optimizer("rowwise_adan", betas=(0.9, 0.98), eps=1e-8)
