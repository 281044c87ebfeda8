"""A small recipe for tests of the whole-step benchmarks."""

from slipstream.config import load_recipe
from slipstream.training.recipe import Recipe


def small_recipe(**changes) -> Recipe:
    """The shipped ML-1M recipe, cut down; no dropout, since the two steps draw other masks."""
    settings = {
        "model__max_len": 12,
        "model__dim": 10,
        "model__dropout": 0.0,
        "model__input_dropout": 0.0,
        "loss__negatives": 6,
    }
    return load_recipe(Recipe, "ml-1m-hstu", **(settings | changes))
