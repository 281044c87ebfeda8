"""The predicted FLOPs of a window as a polynomial of its length, and of a recipe's step."""

import numpy as np
import pytest

from slipstream.models.flops import training_flops
from slipstream.training.step_cost import flop_options, predicted_cost
from tests.support.training_fixtures import small_recipe

RANKING = {
    "task": "ranking",
    "tasks": {"click": {"column": "click"}},
    "loss": {"kind": "bce"},
    "user_features": ["age"],
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model": {"kind": "fuxi", "blocks": 3}},
        {"model": {"kind": "sasrec"}},
        {"loss": {"kind": "full_softmax"}},
        RANKING,
    ],
)
def test_the_polynomial_is_the_models_own_count(changes):
    recipe = small_recipe(**changes)
    cost, options = predicted_cost(recipe, 40), flop_options(recipe, 40)
    lengths = np.array([1, 7, 300, 4096])
    counted = [training_flops(recipe.model, [length], **options) for length in lengths]
    assert cost(lengths) == pytest.approx(counted, rel=1e-12)


def test_the_whole_catalogue_counts_as_negatives():
    assert flop_options(small_recipe(loss={"kind": "full_softmax"}), 40)["negatives"] == 39
    assert flop_options(small_recipe(), 40)["negatives"] == 5
