"""10,000 calls with operands that fit or do not: each ends in a tensor or in a clear exception,
never in a crash.
"""

import random

import torch

from slipstream.ops import losses, rows
from slipstream.ops import pointwise as neighbours

SIZES = (0, 1, 2, 3, 5)
DTYPES = (torch.float32, torch.float32, torch.float32, torch.float64, torch.int64)


def any_floats(rng: random.Random, *shape: int) -> torch.Tensor:
    """Mostly fp32 of the wished shape; sometimes another size, dtype or number of dimensions."""
    sizes = [rng.choice(SIZES) if rng.random() < 0.05 else size for size in shape]
    if rng.random() < 0.03:
        sizes = sizes[1:]
    dtype = rng.choice(DTYPES) if rng.random() < 0.1 else torch.float32
    tensor = torch.full(sizes, 0.5).to(dtype)
    return tensor.t() if tensor.dim() == 2 and rng.random() < 0.05 else tensor


def any_index(rng: random.Random, below: int, *shape: int) -> torch.Tensor:
    """Mostly indices within range; sometimes one just outside, far outside, negative, or of another
    dtype or shape.
    """
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
    kind = rng.randrange(10)
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
        rows.rowwise_adagrad_from_tokens_(
            table, any_floats(rng, count), any_index(rng, count, tokens), x, lr=0.1, eps=1e-8
        )
        return table
    if kind == 7:
        steps, moments = any_index(rng, 9, count), any_floats(rng, count, width)
        betas = (0.9, rng.choice([0.99, 1.0]))
        indices = any_index(rng, count, tokens)
        rows.rowwise_adam_(
            table, moments, any_floats(rng, count), steps, indices, x, lr=0.1, betas=betas, eps=1e-8
        )
        return table
    if kind == 8:
        return neighbours.norm_gate_dropout(
            x,
            any_floats(rng, tokens, width),
            p=rng.choice([0.0, 0.5, 1.0]),
            seed=3,
            token_ids_T=any_index(rng, 9, tokens),
        )
    return neighbours.linear_silu(x, table, any_floats(rng, count) if rng.random() < 0.5 else None)


def test_ten_thousand_calls_end_well():
    rng = random.Random(20)
    refused = served = 0
    for number in range(10_000):
        try:
            out = one_call(rng)
        except (ValueError, TypeError, IndexError) as error:
            assert len(str(error).split()) > 4, f"call {number}: {error!r} explains nothing"
            refused += 1
        else:
            assert isinstance(out, torch.Tensor)
            served += 1
    assert refused > 1_000 and served > 1_000
