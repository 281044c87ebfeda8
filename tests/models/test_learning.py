"""Every model learns, from the weights it starts with, rules that only attention can learn: a dead
path or a wrong start shows.
"""

import pytest
import torch
from torch import nn

from slipstream.models.build import build_model
from slipstream.models.inputs import ModelInput
from tests.support.models_samples import KINDS, config

ITEMS, DIM, USERS, LENGTH = 6, 16, 12, 6


def batch_of(rows_TD, step, labels_TA=None):
    times = torch.arange(LENGTH).repeat(USERS) * 60
    return ModelInput(
        rows={"item": rows_TD},
        offsets_B1=torch.arange(USERS + 1) * LENGTH,
        timestamps_T=times,
        next_timestamps_T=times + 60,
        token_ids_T=torch.arange(USERS * LENGTH),
        labels_TA=labels_TA,
        dropout_seed=step,
    )


def train(task, tasks, draw, loss_of, settings, steps=100):
    """Mean loss of the last steps."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    table = nn.Embedding(ITEMS, DIM)
    nn.init.normal_(table.weight, std=0.02)
    net = build_model(
        config(**settings, dim=DIM, max_len=LENGTH, dropout=0.0, input_dropout=0.0), task, tasks
    )
    optimizer = torch.optim.Adam([*net.parameters(), *table.parameters()], lr=1e-2)
    losses = []
    for step in range(steps):
        items_BN, labels_TA = draw(generator)
        loss = loss_of(
            net(batch_of(table(items_BN.flatten()), step, labels_TA)), items_BN, labels_TA, table
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-10:]) / 10


@pytest.mark.parametrize("kind", KINDS)
def test_retrieval_learns_to_repeat_the_item_before_the_last(kind):
    def draw(generator):
        pairs = torch.stack([torch.randperm(ITEMS, generator=generator)[:2] for _ in range(USERS)])
        return pairs.repeat(1, LENGTH // 2), None

    def loss_of(hidden_TD, items_BN, labels_TA, table):
        scores = hidden_TD.view(USERS, LENGTH, DIM)[:, 1:-1] @ table.weight.T
        return nn.functional.cross_entropy(scores.flatten(0, 1), items_BN[:, 2:].flatten())

    # Knowing the last item alone leaves 5 equally likely ones: a loss of 1.6.
    assert train("retrieval", (), draw, loss_of, {"kind": kind}) < 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_ranking_learns_a_users_mood_from_their_actions(kind):
    def draw(generator):
        items = torch.randint(0, ITEMS, (USERS, LENGTH), generator=generator)
        pleased = torch.randint(0, 2, (USERS, 1), generator=generator).expand(-1, LENGTH)
        return items, torch.stack([pleased, 1 - pleased], dim=-1).flatten(0, 1).float()

    def loss_of(logits_TA, items_BN, labels_TA, table):
        later = torch.arange(USERS * LENGTH) % LENGTH > 0
        return nn.functional.binary_cross_entropy_with_logits(logits_TA[later], labels_TA[later])

    # Without the actions of the history every label is a coin: a loss of 0.69.
    assert train("ranking", ("like", "skip"), draw, loss_of, {"kind": kind}, steps=60) < 0.2
