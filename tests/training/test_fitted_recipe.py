"""Keys that a recipe leaves to the data are chosen by rules; given ones never change."""

import numpy as np
import polars as pl
import pytest
import yaml

from slipstream import api
from slipstream.config import flatten, load_recipe
from slipstream.data import append_log, prepare
from slipstream.errors import SlipstreamError
from slipstream.training.fitted_recipe import DataStatistics, fit_recipe, fitted_settings
from slipstream.training.recipe import Recipe, trained_digest
from slipstream.training.run import train
from slipstream.training.run_directory import read_recipe

DEFAULT = "retrieval-default"
SMALL = ("model.dim=8", "model.heads=1", "model.blocks=1", "train.max_steps=2", "epochs=9")


def log(users, items, rows, seed=1, start=0):
    rng = np.random.default_rng(seed)
    frame = {
        "user_id": rng.integers(0, users, rows),
        "item_id": rng.integers(0, items, rows),
        "timestamp": start + np.arange(rows),
    }
    return pl.DataFrame(frame)


@pytest.fixture
def store(tmp_path):
    return prepare(log(12, 30, 240), tmp_path / "store")


def fitted(store, tmp_path, *overrides):
    return fit_recipe(load_recipe(Recipe, DEFAULT, overrides), store, tmp_path / "no-run")


def test_every_key_that_is_left_out_is_chosen(store, tmp_path):
    recipe, chosen = fitted(store, tmp_path)
    values = flatten(recipe.model_dump(mode="json"))
    assert chosen and all(values[key] == value for key, value in chosen.items())
    assert not recipe.fit_to_data


def test_a_given_key_is_never_changed(store, tmp_path):
    for key, value in fitted_settings(DataStatistics(30, 200, 20)).items():
        other = {"loss.kind": "bce", "item_features": ["colour"]}
        given = other.get(key, 0.05 if isinstance(value, float) else 37)
        recipe, chosen = fitted(store, tmp_path, f"{key}={given}")
        assert key not in chosen
        assert flatten(recipe.model_dump(mode="json"))[key] == given


@pytest.mark.parametrize(
    ("data", "length", "dropout", "loss", "features"),
    [
        (DataStatistics(23_000, 225_000, 20, ("brand",)), 50, 0.5, "full_softmax", ["brand"]),
        (DataStatistics(3_706, 988_000, 554, ("genre",)), 200, 0.2, "full_softmax", []),
        (DataStatistics(1_682, 98_000, 308, ("genre",)), 200, 0.5, "full_softmax", []),
        (DataStatistics(1_000_000, 10**9, 90), 100, 0.2, "sampled_softmax", []),
        (DataStatistics(0, 0, 1), 50, 0.5, "full_softmax", []),
    ],
)
def test_the_rules(data, length, dropout, loss, features):
    chosen = fitted_settings(data)
    assert chosen["model.max_len"] == chosen["sampler.max_len"] == length
    assert chosen["model.dropout"] == chosen["model.input_dropout"] == dropout
    assert chosen["loss.kind"] == loss and chosen["item_features"] == features


def test_a_recipe_without_the_key_is_left_as_it_is(store, tmp_path):
    recipe = load_recipe(Recipe, "ml-1m-hstu")
    assert fit_recipe(recipe, store, tmp_path / "no-run") == (recipe, {})


def test_a_run_tells_and_records_what_was_chosen_and_is_resumed(store, tmp_path, capsys):
    recipe = load_recipe(Recipe, DEFAULT, SMALL)
    train(recipe, store, tmp_path / "run")
    shown = " ".join(capsys.readouterr().err.split()) or ""
    chosen = fit_recipe(recipe, store, tmp_path / "no-run")[1]
    written = flatten(yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text()))
    assert {key: written[key] for key in chosen} == chosen
    assert "fitted to the data: " in shown and f"model.max_len={chosen['model.max_len']}" in shown
    longer = load_recipe(Recipe, DEFAULT, [*SMALL, "train.max_steps=3"])
    assert train(longer, store, tmp_path / "run", quiet=True).step == 3
    with pytest.raises(SlipstreamError, match=r"model\.dropout"):
        other = load_recipe(Recipe, DEFAULT, [*SMALL, "model.dropout=0.07"])
        train(other, store, tmp_path / "run", quiet=True)


def test_a_run_keeps_its_values_when_its_data_grow(store, tmp_path):
    recipe = load_recipe(Recipe, DEFAULT, [*SMALL, "train.max_steps=2"])
    train(recipe, store, tmp_path / "run", quiet=True)
    more = log(12, 30, 6_000, seed=2, start=1_000)
    grown = append_log(store.directory, more, out=tmp_path / "grown").store
    anew, kept = (fit_recipe(recipe, grown, tmp_path / name)[0] for name in ("no-run", "run"))
    assert trained_digest(anew) != trained_digest(kept)
    assert trained_digest(kept) == trained_digest(read_recipe(tmp_path / "run"))
    longer = load_recipe(Recipe, DEFAULT, [*SMALL, "train.max_steps=4"])
    assert train(longer, grown, tmp_path / "run", quiet=True).step == 4


def test_a_search_varies_the_fitted_recipe(store, tmp_path):
    found = api.tune(
        store,
        *SMALL,
        over={"model.dropout": [0.11, 0.12]},
        trials=2,
        out=tmp_path / "search",
    )
    chosen = fitted(store, tmp_path)[1]
    recipes = [read_recipe(tmp_path / "search" / trial.name) for trial in found.trials]
    assert {recipe.model.dropout for recipe in recipes} == {0.11, 0.12}
    assert all(recipe.model.max_len == chosen["model.max_len"] for recipe in recipes)
