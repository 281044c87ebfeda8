"""The benchmark of full-size recipes: every recipe has its data, a failure becomes a row."""

import json

import pytest

from benchmarks import full_recipes
from slipstream.config import RECIPES, load_recipe
from slipstream.training.recipe import Recipe


def test_every_recipe_keeps_its_size():
    for path in RECIPES.glob("*.yaml"):
        whole = load_recipe(Recipe, path.stem)
        run = load_recipe(Recipe, path.stem, list(full_recipes.overrides_of(path.stem)))
        assert (run.model, run.loss, run.train) == (whole.model, whole.loss, whole.train)
        same_sampler = run.sampler == whole.sampler
        assert same_sampler == (not path.stem.startswith("kuairand-27k"))


def test_data_stand_for_the_data_they_are_named_after():
    assert full_recipes.twin_of("kuairand-27k-fuxi")[0] == "kuairand-27k"
    assert full_recipes.twin_of("ml-1m-hstu") == ("movielens", full_recipes.MOVIELENS)


def test_a_recipe_that_fails_is_a_row_with_its_last_words(tmp_path):
    row = full_recipes.train("demo", tmp_path / "nowhere", tmp_path)
    assert row["failure"].startswith("exit 1: error: ") and "nowhere" in row["failure"]


@pytest.mark.slow
def test_the_quick_benchmark_trains(tmp_path):
    result = full_recipes.run(quick=True, json_path=tmp_path / "out.json")
    assert result["claims"] == {"recipes": 2.0, "failed": 0.0}
    assert json.loads((tmp_path / "out.json").read_text())["rows"][0]["loss"] > 0
