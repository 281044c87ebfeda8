"""Each check names the operand; random calls end in a tensor or in a clear exception."""

import random

import pytest
import torch

from slipstream.ops import losses, operand_checks, pointwise, rows

SIZES = (0, 1, 2, 3, 5)
DTYPES = (torch.float32, torch.float32, torch.float32, torch.float64, torch.int64)


def any_floats(rng: random.Random, *shape: int) -> torch.Tensor:
    """Mostly fp32 of the given shape; sometimes another size, dtype or number of dimensions."""
    sizes = [rng.choice(SIZES) if rng.random() < 0.05 else size for size in shape]
    if rng.random() < 0.03:
        sizes = sizes[1:]
    dtype = rng.choice(DTYPES) if rng.random() < 0.1 else torch.float32
    tensor = torch.full(sizes, 0.5).to(dtype)
    return tensor.t() if tensor.dim() == 2 and rng.random() < 0.05 else tensor


def any_index(rng: random.Random, below: int, *shape: int) -> torch.Tensor:
    """Mostly indices within range; sometimes one outside, or another dtype or shape."""
    sizes = [rng.choice(SIZES) if rng.random() < 0.05 else size for size in shape]
    tensor = torch.full(sizes, rng.randrange(max(below, 1)), dtype=torch.int64)
    if tensor.numel() and rng.random() < 0.15:
        tensor.view(-1)[rng.randrange(tensor.numel())] = rng.choice(
            [below, -1, 2**63 - 1, -(2**63), 2**40]
        )
    return (
        tensor.to(rng.choice([torch.int32, torch.float32, torch.bool]))
        if rng.random() < 0.05
        else tensor
    )


def one_call(rng: random.Random) -> torch.Tensor:
    tokens, width, count, negatives = (rng.choice(SIZES) for _ in range(4))
    x, table = any_floats(rng, tokens, width), any_floats(rng, count, width)
    kind = rng.randrange(9)
    if kind == 0:
        return losses.sampled_softmax_loss(
            x, table, any_index(rng, count, tokens), any_index(rng, count, tokens, negatives)
        )
    if kind == 1:
        return losses.shared_softmax_loss(
            x, table, any_index(rng, count, tokens), any_index(rng, count, negatives)
        )
    if kind == 2:
        return losses.full_softmax_loss(
            x, table, any_index(rng, count, tokens), temperature=rng.choice([1.0, 0.05, -1.0])
        )
    if kind == 3:
        return rows.take_rows(table, any_index(rng, count, tokens))
    if kind == 4:
        return rows.coalesce(x, any_index(rng, count, tokens), count)
    if kind == 5:
        rows.rowwise_adagrad_(
            table, any_floats(rng, count), any_index(rng, count, tokens), x, lr=0.1, eps=1e-8
        )
        return table
    if kind == 6:
        steps, moments = any_index(rng, 9, count), any_floats(rng, count, width)
        betas = (0.9, rng.choice([0.99, 1.0]))
        indices = any_index(rng, count, tokens)
        rows.rowwise_adam_(
            table, moments, any_floats(rng, count), steps, indices, x, lr=0.1, betas=betas, eps=1e-8
        )
        return table
    if kind == 7:
        return pointwise.norm_gate_dropout(
            x,
            any_floats(rng, tokens, width),
            p=rng.choice([0.0, 0.5, 1.0]),
            seed=3,
            token_ids_T=any_index(rng, 9, tokens),
        )
    return pointwise.linear_silu(x, table, any_floats(rng, count) if rng.random() < 0.5 else None)


@pytest.mark.parametrize("calls", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_random_calls_give_a_tensor_or_an_exception_with_a_sentence(calls):
    rng = random.Random(20)
    refused = served = 0
    for number in range(calls):
        try:
            out = one_call(rng)
        except (ValueError, TypeError, IndexError) as error:
            assert len(str(error).split()) > 4, f"call {number}: {error!r} explains nothing"
            refused += 1
        else:
            assert isinstance(out, torch.Tensor)
            served += 1
    assert refused > 0.1 * calls and served > 0.1 * calls


ONES, TEN = torch.ones(3, 2), torch.arange(10)


def like(tensor: torch.Tensor) -> None:
    operand_checks.like("x", tensor, "y", ONES, (3, 2))


def index(size: int) -> None:
    operand_checks.index("x", TEN, size, shape=(None,), device=TEN.device)


WRONG = [
    (TypeError, "x must be a tensor", lambda: operand_checks.floating("x", [1.0], dims=1)),
    (TypeError, "x must be floating", lambda: operand_checks.floating("x", TEN, dims=1)),
    (ValueError, "x must have 1 dim", lambda: operand_checks.floating("x", ONES, dims=1)),
    (ValueError, "x must have shape", lambda: like(ONES.T)),
    (TypeError, "dtype of y", lambda: like(ONES.double())),
    (ValueError, "on the device of y", lambda: like(ONES.to("meta"))),
    (IndexError, "between 0 and 8, got 9", lambda: index(9)),
    (ValueError, "run from 0 to 9", lambda: operand_checks.offsets("x", TEN + 1, 9)),
    (ValueError, "never decrease", lambda: operand_checks.offsets("x", torch.tensor([0, 5, 3]), 3)),
    (ValueError, r"2\^62", lambda: operand_checks.times("x", torch.tensor([1 << 62]), 1)),
    (ValueError, "below 1", lambda: operand_checks.probability("x", 1.0)),
    (ValueError, "positive and finite", lambda: operand_checks.positive("x", float("nan"))),
    (ValueError, "zero or more", lambda: operand_checks.not_negative("x", -1.0)),
    (TypeError, "must be a number", lambda: operand_checks.number("x", True)),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_a_check_names_the_operand_and_what_is_wrong(number):
    error, sentence, call = WRONG[number]
    with pytest.raises(error, match=sentence) as raised:
        call()
    assert str(raised.value).startswith("x ")


def test_many_offsets_are_checked_as_few_are():
    many = torch.arange(operand_checks.FEW + 5)
    assert operand_checks.offsets("x", many, len(many) - 1) is many
    with pytest.raises(ValueError, match="never decrease"):
        operand_checks.offsets("x", torch.cat([many[:3], many[1:]]), len(many) - 1)
