"""The grouped softmax: the reference equals the formula, the compiled kernels the reference."""

import pytest
import torch

from slipstream.ops.grouped_losses import (
    GroupedSoftmaxInputs,
    TokenGroups,
    grouped_softmax_loss,
    one_token_groups,
)
from slipstream.ops.losses import sampled_softmax_loss


def offsets(*sizes):
    return torch.tensor([0, *sizes]).cumsum(0)


def operands(groups, *, per_set=5, rows=9, width=20, dtype=torch.float64, log_q=False, seed=0):
    draw = torch.Generator().manual_seed(seed)
    tokens, sets = int(groups.offsets_G1[-1]), int(groups.set_offsets_G1[-1])
    hidden, targets = (
        torch.randn(tokens, width, generator=draw, dtype=dtype).requires_grad_() for _ in range(2)
    )
    matrix = torch.randn(rows, width, generator=draw, dtype=dtype).requires_grad_()
    same = torch.randint(-1, rows, (tokens,), generator=draw)
    negatives = torch.randint(0, rows, (sets, per_set), generator=draw)
    logs = torch.randn(rows, generator=draw, dtype=dtype)
    return GroupedSoftmaxInputs(
        hidden,
        targets,
        same,
        matrix,
        negatives,
        groups,
        0.7,
        logs[same.clamp(min=0)] if log_q else None,
        logs[negatives] if log_q else None,
    )


def by_hand(inputs):
    """Token by token, from the definition."""
    losses = []
    for g in range(inputs.groups.count):
        sets = (
            inputs.negatives_XR[
                inputs.groups.set_offsets_G1[g] : inputs.groups.set_offsets_G1[g + 1]
            ]
            .reshape(-1)
            .tolist()
        )
        first = int(inputs.groups.set_offsets_G1[g]) * inputs.negatives_XR.shape[1]
        for t in range(int(inputs.groups.offsets_G1[g]), int(inputs.groups.offsets_G1[g + 1])):
            own = inputs.hidden_TD[t] @ inputs.targets_TD[t] / inputs.temperature
            own = own if inputs.target_log_q_T is None else own - inputs.target_log_q_T[t]
            scores = [own]
            for place, row in enumerate(sets):
                if row != int(inputs.same_T[t]):
                    logit = inputs.hidden_TD[t] @ inputs.rows_UD[row] / inputs.temperature
                    log_q = inputs.negative_log_q_XR
                    scores.append(
                        logit if log_q is None else logit - log_q.reshape(-1)[first + place]
                    )
            losses.append(torch.logsumexp(torch.stack(scores), 0) - own)
    return torch.stack(losses)


def gradients(inputs, loss):
    weights = torch.linspace(0.5, 1.5, loss.numel(), dtype=loss.dtype)
    return torch.autograd.grad(
        (loss * weights).sum(), [inputs.hidden_TD, inputs.targets_TD, inputs.rows_UD]
    )


SHAPES = {
    "alone": one_token_groups(6),
    "pairs": TokenGroups(offsets(2, 2, 1), offsets(2, 2, 1)),
    "fours and a rest": TokenGroups(offsets(4, 4, 3, 1), offsets(4, 4, 3, 1)),
    "a set per sequence": TokenGroups(offsets(7, 0, 3, 9), offsets(1, 1, 1, 1)),
    "nobody": TokenGroups(offsets(), offsets()),
}


@pytest.mark.parametrize("log_q", [False, True])
@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "nobody"])
def test_the_plain_loss_is_the_formula(shape, log_q):
    inputs = operands(SHAPES[shape], log_q=log_q)
    loss, expected = grouped_softmax_loss(inputs, backend="reference"), by_hand(inputs)
    assert torch.allclose(loss, expected, rtol=1e-12)
    pairs = zip(gradients(inputs, loss), gradients(inputs, expected), strict=True)
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-14) for a, b in pairs)


@pytest.mark.parametrize("width", [3, 16, 20, 50, 64, 100, 130])
@pytest.mark.parametrize("per_set", [1, 4, 19])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_compiled_equals_plain(shape, per_set, width):
    for rows, log_q in ((7, True), (400, False)):
        inputs = operands(
            SHAPES[shape], per_set=per_set, rows=rows, width=width, dtype=torch.float32, log_q=log_q
        )
        loss, expected = (
            grouped_softmax_loss(inputs, backend=backend) for backend in ("native", "reference")
        )
        assert torch.allclose(loss, expected, rtol=2e-5, atol=2e-5)
        for ours, plain in zip(gradients(inputs, loss), gradients(inputs, expected), strict=True):
            assert torch.allclose(
                ours,
                plain,
                rtol=1e-4,
                atol=3e-5 * max(1.0, float(plain.abs().max()) if plain.numel() else 0.0),
            )


@pytest.mark.parametrize("rows", [30, 5000])
def test_many_groups_over_few_and_many_rows(rows):
    """Enough entries for copies per thread (few rows) and for dealing into buckets (many rows)."""
    groups = TokenGroups(torch.arange(0, 401, 4), torch.arange(0, 401, 4))
    inputs = operands(groups, per_set=16, rows=rows, width=50, dtype=torch.float32)
    loss, expected = (
        grouped_softmax_loss(inputs, backend=backend) for backend in ("native", "reference")
    )
    for ours, plain in zip(gradients(inputs, loss), gradients(inputs, expected), strict=True):
        assert torch.allclose(ours, plain, rtol=1e-4, atol=3e-5 * float(plain.abs().max()))


def test_groups_of_one_are_the_sampled_softmax():
    inputs = operands(one_token_groups(40), per_set=33, rows=60, width=50, dtype=torch.float32)
    targets = torch.randint(60, (40,), generator=torch.Generator().manual_seed(9))
    inputs = GroupedSoftmaxInputs(
        inputs.hidden_TD,
        inputs.rows_UD[targets],
        targets,
        inputs.rows_UD,
        inputs.negatives_XR,
        inputs.groups,
        0.5,
    )
    plain = sampled_softmax_loss(
        inputs.hidden_TD, inputs.rows_UD, targets, inputs.negatives_XR, temperature=0.5
    )
    assert torch.allclose(grouped_softmax_loss(inputs), plain, rtol=1e-6, atol=1e-6)


def test_scoring_without_gradients_gives_the_same_loss():
    inputs = operands(SHAPES["fours and a rest"], width=50, dtype=torch.float32)
    with torch.no_grad():
        without = grouped_softmax_loss(inputs, backend="native")
    assert torch.equal(without, grouped_softmax_loss(inputs, backend="native"))


def test_operands_that_do_not_fit_are_refused():
    inputs = operands(SHAPES["pairs"])
    wrong = TokenGroups(offsets(2, 2), offsets(2, 2))
    with pytest.raises(ValueError, match="offsets of groups must rise from 0 to 5"):
        grouped_softmax_loss(GroupedSoftmaxInputs(*list(vars(inputs).values())[:5], wrong))
    with pytest.raises(IndexError):
        grouped_softmax_loss(
            GroupedSoftmaxInputs(
                *list(vars(inputs).values())[:4], inputs.negatives_XR + 9, inputs.groups
            )
        )
    with pytest.raises(ValueError, match="same number of groups"):
        grouped_softmax_loss(
            GroupedSoftmaxInputs(
                *list(vars(inputs).values())[:5], TokenGroups(offsets(5), offsets(2, 2, 1))
            )
        )
