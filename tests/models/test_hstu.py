"""HSTU's layer is the formula of its paper."""

import pytest
import torch
from torch.testing import assert_close

from tests.support.model_formulas import check_formula, check_time_bias
from tests.support.models_samples import given, model, part


@pytest.mark.parametrize(
    ("position_embedding", "dropout_seed"), [(True, None), (False, None), (True, 4321)]
)
@pytest.mark.parametrize(
    "settings",
    [
        {"time_bias": "own"},
        {"time_bias": "next", "dqk": 3, "dv": 5},
        {"time_bias": "none"},
        {"time_bias": "own", "time_encoding": "functional"},
        {"time_bias": "next", "time_encoding": "functional", "position_bias": False},
        {"time_bias": "own", "time_buckets": 5, "position_bias": False},
    ],
)
def test_the_layer_is_the_papers_formula(settings, position_embedding, dropout_seed):
    check_formula("hstu", settings, position_embedding, dropout_seed)


def test_own_and_next_time_differ_only_in_when_a_token_looks_back():
    check_time_bias("hstu")
    check_time_bias("hstu", time_encoding="functional")


def test_divisor_and_scale_are_constants_of_the_recipe():
    both = given([6, 16])
    batch = part(both, 0)
    default = model("hstu")(batch)
    assert torch.equal(default, model("hstu", divisor=16.0, scale=1.0)(batch))
    assert not torch.allclose(default, model("hstu", scale=0.5)(batch))
    # A longer stream of other sequences changes nothing: the divisor is a constant of the model.
    assert_close(default, model("hstu")(both)[:6], atol=1e-13, rtol=1e-13)
