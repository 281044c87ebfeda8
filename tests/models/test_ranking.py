"""The ranking model reads actions, predicts those that follow, and refuses wrong labels."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.support.model_learning import ITEMS, LENGTH, USERS, train
from tests.support.models_samples import KINDS, given, model


@pytest.mark.parametrize("kind", KINDS)
def test_an_item_does_not_see_its_own_action_but_the_next_item_does(kind):
    net, batch = model(kind, "ranking"), given([5])
    labels = batch.labels_TA.clone()
    labels[2] = 1 - labels[2]
    before, after = net(batch), net(replace(batch, labels_TA=labels))
    assert torch.equal(before[:3], after[:3])
    assert not torch.allclose(before[3], after[3])


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


def test_labels_that_do_not_fit_are_refused():
    ranker, batch = model("hstu", "ranking"), given([3])
    with pytest.raises(ValueError, match="give labels_TA"):
        ranker(replace(batch, labels_TA=None))
    with pytest.raises(ValueError, match="2 tasks"):
        ranker(replace(batch, labels_TA=batch.labels_TA[:, :1]))
