"""Paired statistics against cases worked out by hand and against printed tables."""

import math

import pytest

from benchmarks.staleness.paired import compare, holm, sign_flip_p, t_cdf, t_quantile


@pytest.mark.parametrize(
    ("probability", "degrees", "expected"),
    [
        (0.975, 1, 12.7062047364),
        (0.975, 2, 4.30265272975),
        (0.975, 3, 3.18244630528),
        (0.975, 4, 2.7764451052),
        (0.975, 5, 2.57058183661),
        (0.975, 9, 2.26215716274),
        (0.95, 10, 1.81246112281),
        (0.8, 4, 0.94096457723),
    ],
)
def test_quantiles_of_the_printed_tables(probability, degrees, expected):
    assert t_quantile(probability, degrees) == pytest.approx(expected, rel=1e-9)
    assert t_quantile(1 - probability, degrees) == pytest.approx(-expected, rel=1e-9)
    assert t_cdf(expected, degrees) == pytest.approx(probability, abs=1e-10)


def test_the_distribution_with_one_and_two_degrees_is_the_closed_form():
    for t in (-3.0, -0.5, 0.0, 0.7, 20.0):
        assert t_cdf(t, 1) == pytest.approx(0.5 + math.atan(t) / math.pi)
        assert t_cdf(t, 2) == pytest.approx(0.5 + t / (2 * math.sqrt(2 + t * t)))
    assert (t_cdf(math.inf, 4), t_cdf(-math.inf, 4)) == (1.0, 0.0)
    assert t_cdf(1.96, 2000) == pytest.approx(0.5 * (1 + math.erf(1.96 / math.sqrt(2))), abs=1e-4)


def test_sign_flips_counted_by_hand():
    assert sign_flip_p([1.0, 2.0, 3.0]) == 2 / 8  # only all-plus and all-minus reach 6
    assert sign_flip_p([1.0, 2.0, -3.0]) == 1.0  # the sum is zero
    assert sign_flip_p([1.0, 1.0, -1.0]) == 1.0  # every flip reaches 1
    assert sign_flip_p([3.0, 1.0, -1.0]) == 6 / 8  # sums 5 5 3 3 3 3 1 1 in size
    assert sign_flip_p([0.0, 0.0]) == 1.0
    assert sign_flip_p([0.1] * 5) == 2 / 32  # equal sums despite rounding
    with pytest.raises(ValueError, match="1 to 20 pairs"):
        sign_flip_p([])


def test_a_paired_comparison_worked_out_by_hand():
    # Differences 1, 2, 3, 4: mean 2.5, variance 5/3, standard error sqrt(5/12), t = 3.8729833 with
    # 3 degrees of freedom.
    found = compare([2.0, 4.0, 6.0, 8.0], [1.0, 2.0, 3.0, 4.0])
    assert (found.n, found.mean) == (4, 2.5)
    assert found.deviation == pytest.approx(math.sqrt(5 / 3))
    half = 3.18244630528 * math.sqrt(5 / 12)
    assert (found.low, found.high) == pytest.approx((2.5 - half, 2.5 + half))
    assert found.t_p == pytest.approx(0.030466, abs=1e-6)
    assert (found.flip_p, found.smallest_flip_p) == (2 / 16, 2 / 16)
    assert found.detectable == pytest.approx(
        (3.18244630528 + 0.97847231) * math.sqrt(5 / 12), rel=1e-6
    )


def test_differences_without_spread():
    same = compare([0.3, 0.4, 0.5], [0.3, 0.4, 0.5])
    assert (same.mean, same.low, same.high, same.t_p, same.flip_p, same.detectable) == (
        0,
        0,
        0,
        1,
        1,
        0,
    )
    shifted = compare([2.0, 3.0], [1.0, 2.0])
    assert (shifted.mean, shifted.t_p, shifted.flip_p) == (1.0, 0.0, 0.5)
    with pytest.raises(ValueError, match="at least two pairs"):
        compare([1.0], [1.0])


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []
