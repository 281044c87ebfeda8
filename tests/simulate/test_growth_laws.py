"""Two points determine a law of every shape, and the law goes through them."""

import pytest

from slipstream.simulate.growth_laws import GrowthLaw, law_through


@pytest.mark.parametrize("shape", ["linear", "n_log_n", "log", "power"])
def test_a_law_goes_through_its_two_points(shape):
    law = law_through(shape, (128, 600.0), (256, 750.0))
    assert law.at(128) == pytest.approx(600.0) and law.at(256) == pytest.approx(750.0)
    assert law.at(1536) > 750.0


def test_shapes_differ_beyond_their_points():
    at = {
        shape: law_through(shape, (128, 600.0), (256, 750.0)).at(1536)
        for shape in ("log", "power", "linear", "n_log_n")
    }
    assert at["log"] < at["power"] < at["linear"] < at["n_log_n"]
    assert at["linear"] == pytest.approx(600 + 150 / 128 * 1408)


def test_a_constant_does_not_grow_and_no_time_is_negative():
    assert law_through("constant", (1, 5.0), (2, 9.0)).at(1000) == 5.0
    assert GrowthLaw(shape="linear", constant=-10.0, factor=1.0).at(5) == 0.0
