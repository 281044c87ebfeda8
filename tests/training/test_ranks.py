"""Ranks: the mesh they stand in, and what a run of one rank does instead of collectives.

Runs of several ranks are in tests/system/test_ranks.py.
"""

import pytest
import torch

from slipstream.errors import SlipstreamError
from slipstream.training.ranks import ALONE, Ranks, mesh_shape


def test_mesh_shapes():
    assert mesh_shape("auto", 6) == (1, 6) and mesh_shape("2x3", 6) == (2, 3)
    with pytest.raises(SlipstreamError, match="mesh 2x2 needs 4 ranks, but 3 were started"):
        mesh_shape("2x2", 3)


def test_alone_every_collective_is_the_identity():
    assert ALONE.first and (ALONE.shards, ALONE.shard) == (1, 0)
    assert ALONE.shard_group is None and ALONE.replica_group is None
    assert ALONE.sum([1.0, 2.0]) == [1.0, 2.0]
    assert ALONE.on_first_rank(lambda: "answer") == "answer"
    model = torch.nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    before = model.weight.grad.clone()
    ALONE.sum_gradients_(model)
    assert torch.equal(model.weight.grad, before)


def test_a_failure_alone_is_raised_as_it_is():
    ALONE.fail_together(None)
    with pytest.raises(OSError, match="no room"):
        ALONE.fail_together(OSError("no room"))


def test_a_rank_knows_its_place_in_the_mesh():
    ranks = Ranks(rank=4, world=6, replicas=2)
    assert (ranks.shards, ranks.shard, ranks.first) == (3, 1, False)
