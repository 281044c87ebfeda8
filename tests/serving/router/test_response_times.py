"""The times of the last minute, and their percentiles."""

import pytest

from slipstream.serving.router.response_times import MOST, ResponseTimes, percentile


def test_old_times_are_left_out_and_the_rest_ascends():
    times = ResponseTimes()
    for at, seconds in ((0.0, 9.0), (50.0, 0.3), (60.5, 0.1)):
        times.add(at, seconds)
    assert times.recent(61.0) == [0.1, 0.3]
    assert times.recent(500.0) == []


def test_memory_is_bounded():
    times = ResponseTimes()
    for number in range(2 * MOST):
        times.add(1.0, float(number))
    assert times.recent(1.0) == [float(number) for number in range(MOST, 2 * MOST)]


@pytest.mark.parametrize(("share", "value"), [(0.5, 51.0), (0.99, 100.0), (1.0, 100.0), (0, 1.0)])
def test_percentiles_are_values_that_occurred(share: float, value: float):
    assert percentile([float(number) for number in range(1, 101)], share) == value
    assert percentile([], share) is None
