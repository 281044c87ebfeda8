"""A search: trials are ordinary runs, halving goes on exactly, a stopped search goes on alike."""

import json

import pytest

from slipstream.config import load_recipe
from slipstream.errors import SlipstreamError
from slipstream.training import tuning
from slipstream.training.recipe import Recipe
from slipstream.training.run import train
from slipstream.training.search_space import parse_space
from slipstream.training.tuning import rungs, tune
from tests.support.training_fixtures import (
    logged_losses,
    same_tensors,
    saved_tensors,
    small_recipe,
    small_store,
)

pytestmark = pytest.mark.system  # several trainings each
RECIPE = small_recipe(
    optimizer={"decay": "cosine"},
    train={"epochs": 9, "max_steps": 6, "evaluate_every": "2 steps", "log_every": 1},
)
SPACE = parse_space(["optimizer.lr=log(1e-3, 1e-1)", "model.dropout=choice(0.0, 0.2)"])


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("data") / "store")


@pytest.fixture(scope="module")
def halved(store, tmp_path_factory):
    """A search of three trials by halving, undisturbed."""
    return tune(RECIPE, store, tmp_path_factory.mktemp("halved"), SPACE, trials=3, halving=True)


def note(result):
    return json.loads((result.directory / "tune.json").read_text())["trials"]


def test_a_third_goes_on_after_each_share():
    assert rungs(9, halving=True) == [(1 / 9, 9), (1 / 3, 3), (1, 1)]
    assert rungs(16, halving=True) == [(1 / 9, 16), (1 / 3, 5), (1, 1)]
    assert rungs(16, halving=False) == [(1, 16)]
    assert rungs(1, halving=True) == [(1, 1)]


def test_halving_keeps_the_best(halved):
    first, others = halved.trials[0], halved.trials[1:]
    assert (first.status, first.step, len(first.rungs)) == ("finished", 6, 2)
    assert [(one.status, one.step, len(one.rungs)) for one in others] == [("paused", 2, 1)] * 2
    assert first.rungs[0] >= max(one.rungs[0] for one in others)


def test_the_trial_that_got_to_its_end_is_the_run_of_its_recipe(halved, store, tmp_path):
    recipe = load_recipe(Recipe, halved.directory / "best.yaml")
    assert recipe.name == "small-tuned" and recipe.model_dump()["optimizer"]["decay"] == "cosine"
    train(recipe, store, tmp_path / "alone", quiet=True)
    trial = halved.directory / halved.best.name
    assert same_tensors(saved_tensors(trial), saved_tensors(tmp_path / "alone"))
    assert logged_losses(trial) == logged_losses(tmp_path / "alone")


def test_a_search_that_was_stopped_ends_as_the_undisturbed_one(
    halved, store, tmp_path, monkeypatch
):
    real, calls = tuning.train, []

    def train_and_die(*arguments, **options):
        calls.append(1)
        result = real(*arguments, **options)
        if len(calls) % 2 == 0:
            raise KeyboardInterrupt  # trained, but not yet in tune.json
        return result

    monkeypatch.setattr(tuning, "train", train_and_die)
    for _ in range(9):
        try:
            found = tune(RECIPE, store, tmp_path / "cut", SPACE, trials=3, halving=True)
            break
        except KeyboardInterrupt:
            continue
    assert len(calls) >= 4 and note(found) == note(halved)
    assert (tmp_path / "cut" / "report.html").exists()


def test_a_trial_that_fails_makes_room(store, tmp_path):
    recipe = small_recipe(
        loss={"normalize": False},
        train={"max_steps": 4, "epochs": 9, "evaluate_every": 1},
    )
    space = parse_space(["tables.lr=choice(1e-3, 1e38)", "model.heads=choice(2, 3)"])
    said = []
    found = tune(recipe, store, tmp_path / "t", space, trials=3, say=said.append)
    failed = [one for one in found.trials if one.status == "failed"]
    assert found.best.settings["tables.lr"] == 1e-3 and failed
    assert any("lower optimizer.lr" in one.problem for one in failed)
    again = tune(recipe, store, tmp_path / "t", space, trials=3)
    assert note(again) == note(found)
    assert found.frame.height == 3 and found.frame["trial"][0] == found.best.name


def test_another_search_and_wrong_conditions_are_refused(halved, store, tmp_path, monkeypatch):
    with pytest.raises(SlipstreamError, match="holds another search"):
        tune(RECIPE, store, halved.directory, SPACE, trials=3, halving=True, seed=1)
    with pytest.raises(SlipstreamError, match=r"train\.evaluate_every is 0"):
        tune(small_recipe(), store, tmp_path, SPACE, trials=2)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(SlipstreamError, match="is not empty"):
        tune(RECIPE, store, tmp_path, SPACE, trials=2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SlipstreamError, match="without torchrun"):
        tune(RECIPE, store, tmp_path, SPACE, trials=2)


def test_the_test_split_is_never_looked_at(halved):
    for place in halved.directory.glob("trial-*"):
        assert "test" not in json.loads((place / "run.json").read_text())
