"""The losses against their formulas."""

import pytest
import torch
import torch.nn.functional as F

from slipstream.data.sampler import TrainingSampler
from slipstream.ops.grouped_types import TokenGroups
from slipstream.training.objective import (
    RETRIEVAL_LOSSES,
    RetrievalLossInputs,
    literal_shared_softmax,
)
from slipstream.training.recommender import Recommender
from tests.support.training_fixtures import loss_of, small_recipe, small_store, users_of


def inputs_of(shared: bool = False, log_q: bool = False) -> RetrievalLossInputs:
    generator = torch.Generator().manual_seed(0)
    hidden, rows = (
        torch.randn(n, 4, dtype=torch.float64, generator=generator).requires_grad_() for n in (6, 9)
    )
    negatives = torch.randint(0, 9, (11,) if shared else (6, 11), generator=generator)
    logs = (torch.randn(9, dtype=torch.float64, generator=generator)) if log_q else None
    targets = torch.tensor([0, 3, 3, 8, 1, 2])
    target_log_q, negative_log_q = (
        (None, None) if logs is None else (logs[targets], logs[negatives])
    )
    return RetrievalLossInputs(hidden, rows, targets, negatives, 0.7, target_log_q, negative_log_q)


@pytest.mark.parametrize("kind", ["sampled_softmax", "shared_softmax"])
@pytest.mark.parametrize("log_q", [False, True])
def test_softmax_losses_mask_accidental_hits_and_correct_by_log_q(kind, log_q):
    inputs = inputs_of(shared=kind == "shared_softmax", log_q=log_q)
    logits = inputs.hidden_SD @ inputs.rows_UD.T / inputs.temperature
    for t, loss in enumerate(RETRIEVAL_LOSSES[kind].per_token(inputs)):
        negatives = inputs.negatives if kind == "shared_softmax" else inputs.negatives[t]
        corrections = (
            torch.zeros(11)
            if not log_q
            else (
                inputs.negative_log_q
                if inputs.negative_log_q.dim() == 1
                else inputs.negative_log_q[t]
            )
        )
        target = int(inputs.targets_S[t])
        scores = [logits[t, target] - (inputs.target_log_q_S[t] if log_q else 0)]
        scores += [
            logits[t, n] - q
            for n, q in zip(negatives.tolist(), corrections, strict=True)
            if n != target
        ]
        assert torch.allclose(loss, torch.logsumexp(torch.stack(scores), 0) - scores[0], rtol=1e-10)


def test_full_softmax_is_cross_entropy():
    inputs = inputs_of()
    loss = RETRIEVAL_LOSSES["full_softmax"].per_token(inputs)
    logits = inputs.hidden_SD @ inputs.rows_UD.T / inputs.temperature
    assert torch.allclose(
        loss, F.cross_entropy(logits, inputs.targets_S, reduction="none"), rtol=1e-10
    )


def test_bce_and_its_gradients_are_the_formula():
    inputs = inputs_of()
    loss = RETRIEVAL_LOSSES["bce"].per_token(inputs)
    logits = inputs.hidden_SD @ inputs.rows_UD.T / inputs.temperature
    expected = F.softplus(-logits.gather(1, inputs.targets_S[:, None])).squeeze(1)
    hits = inputs.negatives == inputs.targets_S[:, None]
    assert hits.any()
    expected = expected + F.softplus(logits.gather(1, inputs.negatives)).masked_fill(hits, 0.0).sum(
        1
    )
    assert torch.allclose(loss, expected, rtol=1e-10)
    ours = torch.autograd.grad(loss.sum(), [inputs.hidden_SD, inputs.rows_UD], retain_graph=True)
    plain = torch.autograd.grad(expected.sum(), [inputs.hidden_SD, inputs.rows_UD])
    assert all(torch.allclose(a, b, rtol=1e-9) for a, b in zip(ours, plain, strict=True))


def test_the_literal_reading_is_another_objective():
    draw = torch.Generator().manual_seed(2)
    hidden, rows = (
        torch.randn(n, 8, generator=draw, dtype=torch.float64).requires_grad_() for n in (5, 12)
    )
    targets, negatives = (
        torch.randint(12, (5,), generator=draw),
        torch.randint(12, (5, 7), generator=draw),
    )
    groups = TokenGroups(torch.tensor([0, 3, 5]), torch.tensor([0, 3, 5]))
    loss = literal_shared_softmax(
        RetrievalLossInputs(hidden, rows, targets, negatives, 0.5, groups=groups, literal=True)
    )
    logits = hidden @ rows.T / 0.5
    for t, members in enumerate([range(3), range(3), range(3), range(3, 5), range(3, 5)]):
        others = [
            logits[m, n] for m in members for n in negatives[m].tolist() if n != int(targets[t])
        ]
        expected = (
            torch.logsumexp(torch.stack([logits[t, targets[t]], *others]), 0)
            - logits[t, targets[t]]
        )
        assert torch.allclose(loss[t], expected, rtol=1e-12)
    loss[0].backward()
    assert (
        hidden.grad[1].abs().max() > 0 and hidden.grad[3].abs().max() == 0
    )  # its neighbours' queries are pushed, too


def test_every_use_as_a_negative_is_rounded_so_that_a_cut_changes_nothing(tmp_path):
    """A target of one user that is a negative of another is rounded as a negative in any batch."""
    store = small_store(tmp_path, users=12, items=15)
    losses = {}
    for precision in ("fp32", "fp16"):
        recipe = small_recipe(
            loss={"negatives": 5, "precision": precision}, sampler={"batch_size": 6}
        )
        ours = Recommender.build(recipe, store, dtype=torch.float64)
        batch = TrainingSampler(store, recipe.sampler, seed=1, split=recipe.split).next_batch()
        whole = loss_of(ours, batch, 4)
        parts = [loss_of(ours, users_of(batch, users), 4) for users in ([0, 3], [1, 2, 4, 5])]
        assert torch.allclose(whole, sum(parts), rtol=1e-12)
        losses[precision] = float(whole.detach())
    assert losses["fp16"] != losses["fp32"] and abs(losses["fp16"] / losses["fp32"] - 1) < 1e-3
