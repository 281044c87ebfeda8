"""`slipstream runs` and `slipstream compare`, on runs that were trained."""

import json

import pytest

from slipstream.cli.app import run_command
from tests.support.run_notes import write_note
from tests.support.tiny_runs import TINY, prepare_and_train


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """Two trained runs, of which the first was evaluated."""
    place = prepare_and_train(tmp_path_factory.mktemp("runs"))
    assert run_command(["evaluate", str(place / "run")]) == 0
    words = ["train", "ml-1m-hstu", f"data={place / 'store'}", *TINY, "seed=7"]
    assert run_command([*words, "--out", str(place / "other")]) == 0
    return place


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "240")


def test_runs_are_listed_with_status_and_figures(workplace, capsys):
    assert run_command(["runs", str(workplace)]) == 0
    shown = capsys.readouterr().out
    assert str(workplace / "run") in shown and str(workplace / "other") in shown
    assert shown.count("finished") == 2 and shown.count("HR@10") == 3 and "store" in shown
    assert run_command(["runs", str(workplace), "--json"]) == 0
    listed = {run["directory"]: run for run in json.loads(capsys.readouterr().out)}
    assert listed[str(workplace / "run")]["test"]["HR@10"] >= 0
    assert listed[str(workplace / "other")]["recipe"]["seed"] == 7


def test_two_runs_are_compared_by_keys_figures_and_time(workplace, capsys):
    runs = [str(workplace / "run"), str(workplace / "other")]
    assert run_command(["compare", *runs]) == 0
    shown = capsys.readouterr().out
    assert "seed" in shown and "validation HR@10" in shown and "seconds" in shown
    assert "*" in shown and "model.dim" not in shown and "warning" not in shown
    assert run_command(["compare", *runs, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["keys"] == {"seed": [1, 7]} and found["same_data"] is True


def test_runs_on_different_data_are_compared_with_a_warning(workplace, tmp_path, capsys):
    other = write_note(tmp_path / "other", digest="another")
    assert run_command(["compare", str(workplace / "run"), str(other)]) == 0
    assert "warning: these runs were trained on different data" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["runs", "nowhere"], 1, "nowhere is no directory"),
        (["compare", "nowhere", "there"], 1, "nowhere holds no run"),
        (["compare", "nowhere"], 1, "at least two runs"),
        (["compare"], 2, "missing argument"),
    ],
)
def test_mistakes_are_one_sentence(words, code, sentence, capsys):
    assert run_command(words) == code
    assert sentence in capsys.readouterr().err


def test_an_empty_folder_says_how_to_make_a_run(tmp_path, capsys):
    assert run_command(["runs", str(tmp_path)]) == 0
    assert "slipstream train" in capsys.readouterr().out
