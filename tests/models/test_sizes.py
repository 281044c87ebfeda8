"""The named sizes have the published numbers of parameters."""

import pytest
import torch

from slipstream.models.build import build_model, dense_parameters
from slipstream.models.model_config import ModelConfig

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
