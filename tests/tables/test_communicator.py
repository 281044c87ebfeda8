"""Messages of uneven sizes between real gloo ranks, and buffers that are reused."""

import pytest
import torch
import torch.distributed as dist

from slipstream.tables.communicator import Communicator
from tests.support.ranks_fixtures import run_ranks

pytestmark = pytest.mark.system


def check_messages(rank, world):
    one = Communicator(dist.group.WORLD)
    sizes = [to + 1 for to in range(world)]  # to rank w go w + 1 values
    sent = torch.full((sum(sizes),), float(rank))
    received = one.swap(sent, sizes, [rank + 1] * world, "test")
    assert received.tolist() == [float(w) for w in range(world) for _ in range(rank + 1)]
    address = received.data_ptr()
    assert one.swap(sent, sizes, [rank + 1] * world, "test").data_ptr() == address
    counts = one.swap_counts(torch.tensor([[10 * rank + to] for to in range(world)]))
    assert counts.tolist() == [[10 * w + rank] for w in range(world)]
    assert one.gather_counts(torch.tensor([rank, 7])).tolist() == [[w, 7] for w in range(world)]
    assert one.sum_(torch.tensor([1.0, rank])).tolist() == [world, sum(range(world))]
    return [one.rank, one.world]


def check_uneven_tensors(rank, world):
    one = Communicator(dist.group.WORLD)
    keys, rows = torch.arange(rank), torch.full((rank, 3), rank, dtype=torch.float64)
    parts = one.share([keys, rows, torch.tensor([True])])
    for w, (their_keys, their_rows, flag) in enumerate(parts):
        assert their_keys.tolist() == list(range(w)) and flag.tolist() == [True]
        assert their_rows.shape == (w, 3) and (their_rows == w).all()
    before = parts[1][1].clone()
    one.share([keys + 1, rows + 1, torch.tensor([False])])
    assert torch.equal(parts[1][1], before)  # results do not share the buffer
    return True


def test_swaps_counts_and_sums_reach_the_right_ranks(tmp_path):
    assert run_ranks(3, f"{__name__}:check_messages", tmp_path) == [[0, 3], [1, 3], [2, 3]]


def test_tensors_of_different_lengths_are_gathered_by_every_rank(tmp_path):
    assert run_ranks(3, f"{__name__}:check_uneven_tensors", tmp_path) == [True] * 3
