"""Trains a small model on a rule that only attention can learn, from its initial weights."""

import torch
from torch import nn

from slipstream.models.build import build_model
from slipstream.models.inputs import ModelInput
from tests.support.models_samples import config

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
