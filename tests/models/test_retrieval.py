"""The retrieval model learns, from its initial weights, a rule that only attention can learn."""

import pytest
import torch
from torch import nn

from tests.support.model_learning import DIM, ITEMS, LENGTH, USERS, train
from tests.support.models_samples import KINDS


@pytest.mark.parametrize(
    "settings",
    [*({"kind": kind} for kind in KINDS), {"kind": "fuxi", "time_encoding": "functional"}],
)
def test_retrieval_learns_to_repeat_the_item_before_the_last(settings):
    def draw(generator):
        pairs = torch.stack([torch.randperm(ITEMS, generator=generator)[:2] for _ in range(USERS)])
        return pairs.repeat(1, LENGTH // 2), None

    def loss_of(hidden_TD, items_BN, labels_TA, table):
        scores = hidden_TD.view(USERS, LENGTH, DIM)[:, 1:-1] @ table.weight.T
        return nn.functional.cross_entropy(scores.flatten(0, 1), items_BN[:, 2:].flatten())

    # Knowing the last item alone leaves 5 equally likely ones: a loss of 1.6.
    assert train("retrieval", (), draw, loss_of, settings) < 0.5
