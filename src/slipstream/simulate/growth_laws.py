"""How a time grows with the number of workers: laws of two numbers, each through two points.

    linear    c + f n            a message from every peer: latency, incast, lists of keys
    n_log_n   c + f n log2 n     peers in a sorted exchange
    log       c + f log2 n       trees
    power     c n^f              one share of the peers matters more and more
    constant  c                  bytes that every worker sends whatever the others do

Two measured rows determine the two numbers, never the shape: that is an assumption. Touch this to
add a shape.
"""

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Shape = Literal["constant", "linear", "n_log_n", "log", "power"]


class GrowthLaw(BaseModel):
    """A time in milliseconds as a function of the number of workers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    shape: Shape = Field(default="linear", description="constant, linear, n_log_n, log or power")
    constant: float = Field(default=0.0, description="c, in milliseconds")
    factor: float = Field(default=0.0, description="f, in milliseconds (power: an exponent)")

    def at(self, workers: float) -> float:
        """Return the milliseconds at so many workers; never below 0."""
        if self.shape == "power":
            return self.constant * workers**self.factor
        return max(0.0, self.constant + self.factor * _growing_part(self.shape, workers))


def _growing_part(shape: Shape, workers: float) -> float:
    logarithm = math.log2(max(workers, 1.0))
    return {"constant": 0.0, "linear": workers, "n_log_n": workers * logarithm, "log": logarithm}[
        shape
    ]


def law_through(shape: Shape, first: tuple[float, float], second: tuple[float, float]) -> GrowthLaw:
    """Return the law of a shape through two points (workers, milliseconds)."""
    (n1, t1), (n2, t2) = first, second
    if shape == "power":
        exponent = math.log(t2 / t1) / math.log(n2 / n1)
        return GrowthLaw(shape=shape, constant=t1 / n1**exponent, factor=exponent)
    grown = _growing_part(shape, n2) - _growing_part(shape, n1)
    factor = (t2 - t1) / grown if grown else 0.0
    return GrowthLaw(shape=shape, constant=t1 - factor * _growing_part(shape, n1), factor=factor)
