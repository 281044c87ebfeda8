"""FLOPs of a step are those of the definition, and of torch's own counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from slipstream.models.build import build_model
from slipstream.models.flops import backbone_flops, forward_flops, training_flops
from slipstream.models.model_config import ModelConfig
from tests.support.models_samples import given


def test_flops_of_hstu_are_those_of_the_definition():
    config = ModelConfig(kind="hstu", dim=64, blocks=3, heads=2, dqk=16, dv=32)
    lengths, negatives = [0, 1, 7, 200], 128
    tokens = sum(lengths)
    layer = (
        2 * tokens * 64 * (2 * 2 * 16 + 2 * 2 * 32)
        + sum(n * (n + 1) * 2 * (16 + 32) for n in lengths)
        + 2 * tokens * 2 * 32 * 64
    )
    assert backbone_flops(config, lengths) == 3 * layer
    assert (
        forward_flops(config, torch.tensor(lengths), negatives=negatives)
        == 3 * layer + 2 * tokens * 129 * 64
    )
    assert training_flops(config, lengths, negatives=negatives) == 3 * forward_flops(
        config, lengths, negatives=negatives
    )


@pytest.mark.system  # torch's counter takes seconds to load
@pytest.mark.parametrize("kind", ["hstu", "fuxi", "sasrec"])
def test_matrix_products_counted_are_those_torch_counts(kind):
    """With sequences of one token, attention is each token's product with itself."""
    torch.manual_seed(0)
    config = ModelConfig(
        kind=kind, dim=16, heads=2, dqk=4, dv=6, blocks=2, ffn_multiplier=2.0, max_len=8
    )
    model = build_model(config, "retrieval").double()
    batch = given([1] * 5, dim=16)
    with FlopCounterMode(display=False) as counter:
        model(batch)
    counted = counter.get_flop_counts()["Global"]
    dense = sum(
        int(count) for op, count in counted.items() if "addmm" in str(op) or str(op) == "aten.mm"
    )
    maps = 3 if kind == "fuxi" else 1
    attention = 2 * 5 * 2 * 2 * (4 + maps * 6)
    assert backbone_flops(config, [1] * 5) == dense + attention


def test_flops_of_ranking_and_of_maps_left_out():
    config = ModelConfig(kind="fuxi", dim=8, heads=2, head_dim=4)
    stream = backbone_flops(config, [2 * 3 + 2, 2 * 5 + 2])
    assert forward_flops(
        config, [3, 5], task="ranking", num_tasks=3, user_tokens=2
    ) == stream + 2 * 8 * 3 * (8 * 4 + 4)
    bare = ModelConfig(kind="fuxi", dim=8, heads=2, time_bias="none", position_bias=False)
    assert backbone_flops(config, [10]) - backbone_flops(bare, [10]) == 2 * (10 * 11 * 2 * 2 * 4)
