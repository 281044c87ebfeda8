"""Every shipped recipe trains, evaluates and recommends on data of its own kind."""

import numpy as np
import pytest

from slipstream import api
from slipstream.config import RECIPES, load_recipe
from slipstream.data.synthetic import Synthetic
from slipstream.training.recipe import Recipe

SHIPPED = sorted(path.stem for path in RECIPES.glob("*.yaml"))
SMALL = ("max_steps=3", "epochs=1", "evaluate_every=1", "sampler.batch_size=8", "threads=1")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    out = tmp_path_factory.mktemp("synthetic") / "store"
    return api.prepare("synthetic", out, synthetic=Synthetic(users=40, items=60, seed=3))


def test_recipes_ship():
    assert {
        "ml-1m-hstu",
        "ml-1m-hstu-full",
        "ml-1m-fuxi",
        "ml-1m-fuxi-functional",
        "ml-1m-sasrec",
        "kuairand-pure-ranking",
        "demo",
        "retrieval-default",
    } <= set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_recipe_runs(name, store, tmp_path):
    recipe = load_recipe(Recipe, name, SMALL)
    if recipe.task == "ranking":  # the synthetic log has its own actions and features
        columns = sorted(store.actions)
        tasks = {
            task: value.model_copy(update={"column": columns[i % len(columns)]})
            for i, (task, value) in enumerate(recipe.tasks.items())
        }
        features = {
            "item_features": tuple(store.item_features),
            "user_features": tuple(store.user_features),
        }
        recipe = recipe.model_copy(update={"tasks": tasks, **features})
    run = api.train(recipe, data=store, out=tmp_path / "run", quiet=True)
    figures = run.evaluate("test")
    assert all(
        np.isfinite(value) or name.split("/")[0] in ("AUC", "GAUC", "NE")
        for name, value in figures.items()
    )
    assert run.recommend(store.users.id(0), k=5).height == 5
