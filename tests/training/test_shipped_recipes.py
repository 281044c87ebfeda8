"""Every shipped recipe trains, evaluates and recommends on data of its own kind."""

import numpy as np
import pytest

from slipstream import api
from slipstream.config import load_recipe
from slipstream.data.synthetic import Synthetic
from slipstream.training.recipe import Recipe
from tests.support.shrunk_recipes import SHIPPED, shrunk

pytestmark = pytest.mark.system  # whole runs: too long for a unit test


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    out = tmp_path_factory.mktemp("synthetic") / "store"
    return api.prepare("synthetic", out, synthetic=Synthetic(users=40, items=60, seed=3))


def test_recipes_ship():
    assert {
        "ml-1m-hstu",
        "ml-1m-hstu-full",
        "ml-1m-hstu-large",
        "ml-1m-fuxi",
        "ml-1m-fuxi-functional",
        "ml-1m-sasrec",
        "kuairand-pure-ranking",
        "demo",
        "retrieval-default",
        *(f"kuairand-{size}-{kind}" for size in ("1k", "27k") for kind in ("hstu", "fuxi")),
        "synthetic-100m",
    } <= set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_recipe_runs(name, store, tmp_path):
    recipe = load_recipe(Recipe, name, [*shrunk(name, store, tmp_path / "rows"), "max_steps=3"])
    run = api.train(recipe, data=store, out=tmp_path / "run", quiet=True)
    figures = run.evaluate("test")
    assert all(
        np.isfinite(value) or name.split("/")[0] in ("AUC", "GAUC", "NE")
        for name, value in figures.items()
    )
    assert run.recommend(store.users.id(0), k=5).height == 5


@pytest.mark.parametrize("name", [name for name in SHIPPED if "kuairand" in name or "100m" in name])
def test_recipes_at_scale_use_what_scales(name):
    recipe = load_recipe(Recipe, name)
    assert recipe.tables.optimizer == "rowwise_adagrad"
    if recipe.task == "retrieval":
        assert recipe.train.schedule == "nested" and recipe.model.time_bias == "next"
    if "kuairand" in name and recipe.task == "retrieval":
        assert recipe.sampler.max_len == recipe.model.max_len >= 2048
        assert recipe.sampler.balance == "karmarkar_karp" and recipe.sampler.token_budget
        stale = load_recipe(Recipe, name, ["train.schedule=semi_async", "synchronous_steps=500"])
        assert stale.train.staleness == 1
