"""Inputs of another width: projected, row by row alike, and nothing else changes."""

import torch

from slipstream.models.build import build_model
from slipstream.models.inputs import ModelInput
from slipstream.models.model_config import ModelConfig
from slipstream.models.projection import InputProjections

TINY = ModelConfig(kind="hstu", dim=8, blocks=1, heads=2, max_len=8)


def test_only_the_named_inputs_are_projected():
    layers = InputProjections({"item.tag": 3}, 8)
    rows = {"item": torch.randn(5, 8), "item.tag": torch.randn(5, 3)}
    found = layers(rows)
    assert found["item"] is rows["item"]
    expected = rows["item.tag"] @ layers.layers[0].weight.T
    torch.testing.assert_close(found["item.tag"], expected)


def test_a_row_is_projected_alike_in_any_company():
    layers, rows = InputProjections({"user.age": 48}, 64), torch.randn(40, 48)
    together = layers({"user.age": rows})["user.age"]
    for count in (1, 3, 8, 17):
        assert torch.equal(layers({"user.age": rows[:count]})["user.age"], together[:count])
    assert layers({"user.age": rows[:0]})["user.age"].shape == (0, 64)


def test_a_behaviours_token_is_the_sum_of_its_projected_inputs():
    torch.manual_seed(1)
    widths = {"item.tag": 3, "vector.text": 5}
    net = build_model(TINY, "retrieval", (), (), ("tag",), ("vector.text",), widths)
    rows = {
        name: torch.randn(2, width)
        for name, width in {"item": 8, "item.tag": 3, "vector.text": 5}.items()
    }
    none_T = torch.zeros(2, dtype=torch.int64)
    given = ModelInput(rows, torch.tensor([0, 2]), none_T, none_T, none_T)
    tag, text = (layer.weight for layer in net.projections.layers)
    expected = rows["item"] + rows["item.tag"] @ tag.T + rows["vector.text"] @ text.T
    torch.testing.assert_close(net.stream(given, None).x_SD, expected * net.factor)


def test_a_model_without_such_inputs_starts_as_it_always_did():
    def weights(widths):
        torch.manual_seed(2)
        return build_model(TINY, "retrieval", (), (), ("tag",), widths=widths).state_dict()

    plain, wide = weights(None), weights({"item.tag": 3})
    assert set(wide) - set(plain) == {"projections.layers.0.weight"}
    assert all(torch.equal(wide[name], value) for name, value in plain.items())
