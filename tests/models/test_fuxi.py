"""FuXi's layer is the formula of its paper."""

import pytest

from tests.support.model_formulas import check_formula, check_time_bias


@pytest.mark.parametrize(
    ("position_embedding", "dropout_seed"), [(True, None), (False, None), (True, 4321)]
)
@pytest.mark.parametrize(
    "settings",
    [
        {"time_bias": "own", "dqk": 3, "dv": 5},
        {"time_bias": "next", "ffn_multiplier": 2.0},
        {"time_bias": "none", "position_bias": False},
        {"time_bias": "own", "time_encoding": "functional"},
        {"time_bias": "next", "time_encoding": "functional", "position_bias": False},
    ],
)
def test_the_layer_is_the_papers_formula(settings, position_embedding, dropout_seed):
    check_formula("fuxi", settings, position_embedding, dropout_seed)


def test_own_and_next_time_differ_only_in_when_a_token_looks_back():
    check_time_bias("fuxi")
    check_time_bias("fuxi", time_encoding="functional")
