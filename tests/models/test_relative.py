"""A layer's biases are those its recipe asks for."""

import pytest
import torch

from slipstream.models.backbone import make_view
from slipstream.models.relative import RelativeTables
from slipstream.ops.attention import RelativeBias, fuxi_attention
from tests.support.models_samples import config, given, model


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({"time_buckets": 20}, (2 * 16 - 1, 21)),
        ({"time_buckets": 20, "position_bias": False}, (None, 21)),
        ({"time_bias": "none"}, (2 * 16 - 1, None)),
    ],
)
def test_tables_have_an_entry_per_distance_and_per_bucket(settings, sizes):
    bias = RelativeTables(config("hstu", **settings), 16).bias()
    found = [None if table is None else table.numel() for table in (bias.position_P, bias.time_W)]
    assert found == list(sizes)


def test_a_functional_time_encoding_has_three_parameters_within_their_bounds():
    tables = RelativeTables(config("fuxi", time_encoding="functional", time_bias="next"), 16)
    assert tables.time_W is None
    assert tables.bias().decay_3.tolist() == pytest.approx([0.02, 1.0, 0.25])
    with torch.no_grad():
        tables.decay_3.copy_(torch.tensor([-3.0, -20.0, 20.0]))
    a, b, c = tables.bias().decay_3.tolist()
    assert a == -3 and 0 < b < 1e-8 and 0.99 < c <= 1


def test_training_finds_the_function_that_made_the_data():
    """From the start values, by gradients through attention: every parameter is learnt."""
    tables = RelativeTables(config("fuxi", time_encoding="functional", position_bias=False), 16)
    g = torch.Generator().manual_seed(0)
    q, v = (torch.randn(120, 1, 8, generator=g) for _ in range(2))
    times = (torch.rand(120, generator=g) * 12).exp().long().cumsum(0)

    def time_map(bias):
        offsets = torch.tensor([0, 40, 120])
        return fuxi_attention(q, q, v, offsets, divisor=1.0, bias=bias, timestamps_T=times)[:, 1]

    truth = torch.tensor([1.3, 0.4, 0.6])
    target = time_map(RelativeBias(decay_3=truth))
    optimizer = torch.optim.Adam(tables.parameters(), lr=0.05)
    losses = []
    for _ in range(300):
        loss = (time_map(tables.bias()) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 1e-3 * losses[0]
    torch.testing.assert_close(tables.bias().decay_3, truth, rtol=0.05, atol=0)


def test_without_tables_there_is_no_bias_and_no_time():
    tables = RelativeTables(config("hstu", time_bias="none", position_bias=False), 16)
    view = make_view(model("hstu").stream(given([3]), None).layout, None)
    assert tables.bias() is None and tables.times(view) == (None, None)
    for encoding in ("buckets", "functional"):
        timed = RelativeTables(config("hstu", time_encoding=encoding), 16)
        assert timed.times(view) == (view.query_timestamps_T, view.key_timestamps_S)
