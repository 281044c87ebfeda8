"""Statistics of paired differences: the same seed trained twice, with one thing changed.

Few seeds are affordable, so everything here is exact for small samples: Student's t with its finite
sums for whole degrees of freedom, the sign-flip permutation test over all 2^n flips, Holm's
correction, and what difference the sample could have found.
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MOST_FLIPPED = 20  # pairs whose 2^n sign flips are all listed


def t_cdf(t: float, degrees: int) -> float:
    """Return P(T <= t) of Student's distribution with whole degrees of freedom."""
    if degrees < 1:
        raise ValueError(
            f"Student's distribution needs at least one degree of freedom, got {degrees}"
        )
    if math.isinf(t):
        return 1.0 if t > 0 else 0.0
    angle = math.atan(t / math.sqrt(degrees))
    cosine, sine = math.cos(angle), math.sin(angle)
    if degrees % 2:
        total, term = angle, sine * cosine
        for step in range(1, (degrees - 1) // 2 + 1):
            total += term
            term *= cosine * cosine * (2 * step) / (2 * step + 1)
        inside = 2 / math.pi * total
    else:
        total, term = 0.0, sine
        for step in range(1, degrees // 2 + 1):
            total += term
            term *= cosine * cosine * (2 * step - 1) / (2 * step)
        inside = total
    return 0.5 * (1 + inside)


def t_quantile(probability: float, degrees: int) -> float:
    """Return the t with P(T <= t) = probability, by bisection."""
    if not 0 < probability < 1:
        raise ValueError(f"a quantile needs a probability between 0 and 1, got {probability}")
    if probability < 0.5:
        return -t_quantile(1 - probability, degrees)
    low, high = 0.0, 1.0
    while t_cdf(high, degrees) < probability:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, degrees) < probability else (low, middle)
    return (low + high) / 2


def sign_flip_p(differences: Sequence[float]) -> float:
    """Return the p value of the two-sided exact permutation test.

    It is the share of all sign flips whose sum is at least as far from zero.
    """
    if not 1 <= len(differences) <= MOST_FLIPPED:
        raise ValueError(
            f"the exact test lists all sign flips, so it takes 1 to {MOST_FLIPPED} pairs, got "
            f"{len(differences)}"
        )
    observed = abs(math.fsum(differences))
    slack = 1e-12 * math.fsum(
        abs(each) for each in differences
    )  # equal sums in another order count as equal
    flips = itertools.product((1.0, -1.0), repeat=len(differences))
    sums = [
        abs(math.fsum(sign * each for sign, each in zip(signs, differences, strict=True)))
        for signs in flips
    ]
    return sum(each >= observed - slack for each in sums) / len(sums)


@dataclass(frozen=True)
class Paired:
    """Statistics of n paired differences."""

    n: int
    mean: float
    deviation: float  # sample standard deviation of the differences
    low: float  # 95 % confidence interval of the mean
    high: float
    t_p: float  # two-sided paired t test
    flip_p: float  # two-sided exact sign-flip test
    smallest_flip_p: float  # what the sign-flip test can reach at best with n pairs
    detectable: (
        float  # a true difference this large is found in about 80 of 100 such studies (t test, 5 %)
    )


def compare(
    values: Sequence[float], baseline: Sequence[float], confidence: float = 0.95, power: float = 0.8
) -> Paired:
    """Compute statistics of values - baseline, pair by pair; needs two pairs."""
    differences = [value - base for value, base in zip(values, baseline, strict=True)]
    n = len(differences)
    if n < 2:
        raise ValueError(f"a paired comparison needs at least two pairs, got {n}")
    mean, deviation = math.fsum(differences) / n, statistics.stdev(differences)
    error, critical = deviation / math.sqrt(n), t_quantile(0.5 + confidence / 2, n - 1)
    t = abs(mean) / error if error > 0 else math.inf if mean else 0.0
    return Paired(
        n=n,
        mean=mean,
        deviation=deviation,
        low=mean - critical * error,
        high=mean + critical * error,
        t_p=2 * (1 - t_cdf(t, n - 1)),
        flip_p=sign_flip_p(differences),
        smallest_flip_p=2.0 ** (1 - n),
        detectable=(critical + t_quantile(power, n - 1)) * error,
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p values, in the order given, for several tests at once."""
    order = sorted(range(len(p_values)), key=lambda place: p_values[place])
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = highest
    return adjusted
