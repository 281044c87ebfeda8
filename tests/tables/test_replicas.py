"""Replica groups: summed gradients equal one group, averaged weights follow their formula."""

import pytest
import torch
import torch.distributed as dist

from slipstream.tables.collection import TableCollection
from slipstream.tables.communicator import Communicator
from slipstream.tables.memory_table import MemoryTable
from slipstream.tables.replicas import AveragedWeights, SummedGradients, rescaled_for_averaging
from slipstream.tables.row_optimizers import DenseAdamW, RowwiseAdagrad, RowwiseAdam
from tests.support.ranks_fixtures import run_ranks
from tests.support.training_fixtures import small_recipe

KEYS = [torch.tensor([0, 1, 2]), torch.tensor([2, 3])]
LR = 0.1


def gradient_of(rank, step):
    return torch.randn(
        len(KEYS[rank]),
        4,
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(10 * step + rank),
    )


def two_replicas(rank, world, every, steps):
    """Each replica applies its own gradients; returns its rows and sums after every step."""
    optimizer = rescaled_for_averaging(RowwiseAdagrad(eps=1e-6), world)
    table = MemoryTable("item", 6, 4, optimizer, seed=1, dtype=torch.float64)
    tables = TableCollection(
        [table], replicas=AveragedWeights(Communicator(dist.group.WORLD), every)
    )
    seen = []
    for step in range(steps):
        lookups = tables.lookup({"item": [KEYS[rank]]})
        lookups["item"].rows_UD.grad = gradient_of(rank, step) / world
        tables.apply(lookups, LR)
        rows = table.read(torch.arange(6))
        seen.append([rows.weights_UD.tolist(), rows.state["sum"].tolist()])
    return seen


def by_hand(every, steps):
    """The same in one process: lr * g / (sqrt(sum / M) + eps), then the mean over replicas."""
    start = (
        MemoryTable("item", 6, 4, RowwiseAdagrad(), seed=1, dtype=torch.float64).all_rows().clone()
    )
    weights, sums, seen = (
        [start.clone(), start.clone()],
        [torch.zeros(6, dtype=torch.float64) for _ in range(2)],
        [[], []],
    )
    for step in range(steps):
        for rank in range(2):
            grads = gradient_of(rank, step)
            sums[rank][KEYS[rank]] += (grads**2).mean(1)
            weights[rank][KEYS[rank]] -= (
                LR * grads / ((sums[rank][KEYS[rank]] / 2).sqrt() + 1e-6).unsqueeze(1)
            )
        if (step + 1) % every == 0:
            weights = [sum(weights) / 2 for _ in range(2)]
            sums = [sum(sums) / 2 for _ in range(2)]
        for rank in range(2):
            seen[rank].append([weights[rank].clone(), sums[rank].clone()])
    return seen


@pytest.mark.system
@pytest.mark.parametrize("every", [1, 3])
def test_averaged_replicas_follow_the_written_out_formula(tmp_path, every):
    answers, wanted = (
        run_ranks(2, f"{__name__}:two_replicas", tmp_path, every=every, steps=4),
        by_hand(every, 4),
    )
    for rank in range(2):
        for found, expected in zip(answers[rank], wanted[rank], strict=True):
            for left, right in zip(found, expected, strict=True):
                assert torch.allclose(
                    torch.tensor(left, dtype=torch.float64), right, rtol=1e-12, atol=1e-14
                )
    met = 2 if every == 3 else 3
    assert answers[0][met] == answers[1][met]  # the same bits where they meet
    assert every == 1 or answers[0][0] != answers[1][0]


def summed_replicas(rank, world, steps):
    """Both replicas apply the sum of their gradients; returns this replica's rows and sums."""
    table = MemoryTable("item", 6, 4, RowwiseAdagrad(), seed=1, dtype=torch.float64)
    small = MemoryTable("small", 3, 4, DenseAdamW(), seed=1, dtype=torch.float64)
    replicas = SummedGradients(Communicator(dist.group.WORLD), frozenset(["small"]))
    tables = TableCollection([table, small], replicas=replicas)
    for step in range(steps):
        lookups = tables.lookup({"item": [KEYS[rank]], "small": [torch.tensor([rank])]})
        lookups["item"].rows_UD.grad = gradient_of(rank, step)
        lookups["small"].rows_UD.grad = torch.full((3, 4), 1.0 + rank, dtype=torch.float64)
        tables.apply(lookups, LR)
    rows = table.read(torch.arange(6))
    return [rows.weights_UD.tolist(), rows.state["sum"].tolist(), small.weights_ND.tolist()]


@pytest.mark.system
def test_summed_replicas_equal_one_group_bit_for_bit(tmp_path):
    one, two = run_ranks(2, f"{__name__}:summed_replicas", tmp_path, steps=4)
    assert one == two
    alone = TableCollection(
        [MemoryTable("item", 6, 4, RowwiseAdagrad(), seed=1, dtype=torch.float64)]
    )
    for step in range(4):
        lookups = [alone.lookup({"item": [KEYS[rank]]}) for rank in range(2)]
        for rank, each in enumerate(lookups):
            each["item"].rows_UD.grad = gradient_of(rank, step)
        alone.apply(lookups, LR)
    rows = alone["item"].read(torch.arange(6))
    assert [rows.weights_UD.tolist(), rows.state["sum"].tolist()] == one[:2]


def test_only_adagrad_is_rescaled_and_dense_optimizers_are_refused():
    assert rescaled_for_averaging(RowwiseAdam(), 4) == RowwiseAdam()
    rescaled = rescaled_for_averaging(RowwiseAdagrad(eps=1e-8, lr_factor=0.5), 4)
    assert rescaled == RowwiseAdagrad(eps=2e-8, lr_factor=1.0)
    with pytest.raises(ValueError, match="cannot be averaged"):
        small_recipe(tables={"optimizer": "adamw", "replicas": "averaged"})
