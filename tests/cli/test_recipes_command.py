"""`slipstream recipes` lists what ships, prints one, and explains every key."""

import json

import pytest
import yaml

from slipstream.cli.app import run_command
from slipstream.config import RECIPES
from slipstream.training.recipe_reference import recipe_keys


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "240")


def test_the_list_has_every_recipe_with_a_line_about_it(capsys):
    assert run_command(["recipes"]) == 0
    shown = capsys.readouterr().out
    assert all(path.stem in shown for path in RECIPES.glob("*.yaml"))
    assert "SASRec on MovieLens-1M" in shown and "data/kuairand-pure" in shown
    assert "data/kuairand-1k, schedule: nested" in shown
    assert shown.count("schedule: plain loop only") == 2  # ml-1m-hstu-full, ml-1m-hstu-large


def test_one_recipe_is_printed_as_its_file_and_can_be_trained_from_it(tmp_path, capsys):
    assert run_command(["recipes", "ml-1m-sasrec"]) == 0
    shown = capsys.readouterr().out
    assert shown == (RECIPES / "ml-1m-sasrec.yaml").read_text()
    (tmp_path / "mine.yaml").write_text(shown)
    assert run_command(["recipes", str(tmp_path / "mine.yaml"), "--json"]) == 0
    complete = json.loads(capsys.readouterr().out)
    assert complete["model"]["kind"] == yaml.safe_load(shown)["model"]["kind"] == "sasrec"
    assert complete["train"]["keep_last"] == 2  # what the file leaves out


def test_every_key_is_explained(capsys):
    assert run_command(["recipes", "--keys"]) == 0
    shown = capsys.readouterr().out
    assert not [key.key for key in recipe_keys() if key.key not in shown]
    assert run_command(["recipes", "--keys", "--json"]) == 0
    listed = {key["key"]: key for key in json.loads(capsys.readouterr().out)}
    assert listed["train.patience"]["values"] == "whole number of at least 1"


def test_the_list_as_json(capsys):
    assert run_command(["recipes", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {"name": "demo", "task": "retrieval"}.items() <= listed[0].items()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["ml-1m-hst"], "there is no recipe 'ml-1m-hst'; did you mean"),
        (["demo", "--keys"], "choose one"),
    ],
)
def test_mistakes_are_one_sentence(words, sentence, capsys):
    assert run_command(["recipes", *words]) == 1
    assert sentence in capsys.readouterr().err
