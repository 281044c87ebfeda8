"""Configs and named sizes: what is left open is filled, what is wrong is told, and the parameter
counts are the published ones.
"""

import pytest
import torch
from pydantic import ValidationError
from torch.utils.flop_counter import FlopCounterMode

from slipstream.models.build import build_model, dense_parameters
from slipstream.models.flops import backbone_flops, forward_flops, training_flops
from slipstream.models.model_config import ModelConfig
from tests.support.models_samples import given

PUBLISHED = {
    "hstu": {"tiny": 0.17, "small": 1.33, "medium": 10.52, "large": 83.97, "long": 83.97},
    "fuxi": {"tiny": 0.41, "small": 3.18, "medium": 25.22, "large": 201.55, "long": 201.55},
}


@pytest.mark.parametrize(
    ("kind", "size"), [(kind, size) for kind, sizes in PUBLISHED.items() for size in sizes]
)
def test_named_sizes_have_the_published_parameter_counts(kind, size):
    with torch.device("meta"):
        model = build_model(ModelConfig(kind=kind, size=size), "retrieval")
    assert dense_parameters(model) / 1e6 == pytest.approx(PUBLISHED[kind][size], rel=0.02)


def test_the_arithmetic_of_a_tiny_hstu():
    with torch.device("meta"):
        model = build_model(ModelConfig(kind="hstu", size="tiny"), "retrieval")
    assert dense_parameters(model) == 2 * (5 * 128**2 + 128) + 2 * (2 * 2048 - 1 + 33)


def test_a_size_fills_what_is_left_open_and_nothing_else():
    config = ModelConfig(kind="fuxi", size="medium", max_len=100, blocks=3)
    assert (config.dim, config.heads, config.dqk, config.dv, config.time_buckets) == (
        512,
        8,
        64,
        64,
        128,
    )
    assert (config.max_len, config.blocks, config.position_embedding) == (100, 3, False)
    assert ModelConfig(kind="hstu", size="long").max_len == 4096


def test_a_dumped_config_says_everything_and_comes_back_the_same():
    for config in (
        ModelConfig(),
        ModelConfig(kind="sasrec", size="small"),
        ModelConfig(kind="fuxi", heads=4, dv=7),
    ):
        assert ModelConfig(**config.model_dump()) == config
        assert config.dqk > 0 and config.dv > 0


def test_defaults_by_kind():
    assert (ModelConfig().time_bias, ModelConfig().position_bias) == ("own", True)
    sasrec = ModelConfig(kind="sasrec")
    assert (sasrec.time_bias, sasrec.position_bias, sasrec.position_embedding) == (
        "none",
        False,
        True,
    )


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"dim": 50, "heads": 4}, "dim 50 cannot be shared by 4 heads"),
        ({"kind": "sasrec", "time_bias": "own"}, "sasrec has no relative bias"),
        ({"time_buckets": 0}, "a time bias needs buckets"),
        ({"kind": "transformer"}, "'hstu', 'fuxi' or 'sasrec'"),
        ({"size": "huge"}, "'tiny', 'small', 'medium', 'large' or 'long'"),
        ({"blokcs": 2}, "Extra inputs are not permitted"),
        ({"dropout": 1.0}, "less than 1"),
        ({"dim": 0}, "greater than or equal to 1"),
        ({"divisor": 0.0}, "greater than 0"),
    ],
)
def test_what_is_wrong_is_told(settings, sentence):
    with pytest.raises(ValidationError, match=sentence):
        ModelConfig(**settings)


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


@pytest.mark.parametrize("kind", ["hstu", "fuxi", "sasrec"])
def test_matrix_products_counted_are_those_torch_counts(kind):
    """Weights meet tokens exactly as often as torch's own counter sees, apart from attention
    (length 1: nothing but itself).
    """
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
