"""SASRec's layer is the formula of its paper."""

import pytest

from tests.support.model_formulas import check_formula


@pytest.mark.parametrize(
    ("position_embedding", "dropout_seed"), [(True, None), (False, None), (True, 4321)]
)
@pytest.mark.parametrize(
    "settings",
    [
        {"dqk": 3, "dv": 5, "ffn_multiplier": 2.0},
    ],
)
def test_the_layer_is_the_papers_formula(settings, position_embedding, dropout_seed):
    check_formula("sasrec", settings, position_embedding, dropout_seed)
