"""The reference names every key and every shipped recipe, and what it says can be used."""

import yaml

from slipstream.config import RECIPES, load_recipe
from slipstream.training.recipe import Recipe
from slipstream.training.recipe_reference import recipe_keys, recipe_text, shipped_recipes
from tests.support.training_fixtures import small_recipe


def test_every_key_of_a_recipe_is_listed_with_words():
    listed = {key.key: key for key in recipe_keys()}
    dumped = small_recipe().model_dump(mode="json")
    for section, values in dumped.items():
        if isinstance(values, dict) and section != "tasks":
            assert {f"{section}.{name}" for name in values} <= listed.keys()
        else:
            assert section in listed
    assert {"tasks.NAME.column", "tasks.NAME.weight"} <= listed.keys()
    assert not [key for key, found in listed.items() if not found.meaning or not found.values]
    assert (listed["model.dim"].values, listed["model.dim"].default) == (
        "whole number of at least 1 and at most 16384",
        "64",
    )


def test_every_default_can_be_given_as_an_override():
    given = [
        f"{key.key}={key.default}"
        for key in recipe_keys()
        if key.default and "NAME" not in key.key and key.key != "sampler.batch_size"
    ]
    assert len(given) > 50
    recipe = load_recipe(Recipe, "demo", given)
    assert recipe.model.dim == 64 and recipe.optimizer.betas == (0.9, 0.98)


def test_every_shipped_recipe_is_listed_with_its_first_comment():
    listed = {one.name: one for one in shipped_recipes()}
    assert listed.keys() == {path.stem for path in RECIPES.glob("*.yaml")}
    assert all(one.about for one in listed.values())
    assert listed["kuairand-pure-ranking"].task == "ranking"
    assert listed["ml-1m-fuxi"].model == "fuxi" and listed["ml-1m-fuxi"].data == "data/ml-1m"


def test_the_text_of_a_recipe_is_its_file():
    assert yaml.safe_load(recipe_text("demo"))["name"] == "demo"
