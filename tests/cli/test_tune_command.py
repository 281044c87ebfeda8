"""`slipstream tune`: its table, its files, its refusals."""

import json

import pytest
import yaml

from slipstream.cli.app import run_command
from slipstream.training.report import COMPARED
from tests.support.training_fixtures import small_recipe, small_store


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    place = tmp_path_factory.mktemp("tune")
    store = small_store(place / "store")
    recipe = small_recipe(train={"max_steps": 2, "evaluate_every": 1, "log_every": 1})
    (place / "small.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    return ["tune", str(place / "small.yaml"), f"data={store.directory}"]


@pytest.mark.system
def test_a_search_prints_its_trials_and_writes_the_best(words, tmp_path, capsys):
    out = tmp_path / "search"
    over = ["--over", "optimizer.lr=choice(0.001, 0.01)", "--trials", "2", "--out", str(out)]
    assert run_command([*words, *over]) == 0
    printed = capsys.readouterr()
    assert "trial-000" in printed.out and "trial-001" in printed.out
    assert f"next: slipstream evaluate {out}" in printed.out.replace("\n", "")
    assert "trial 2 of 2: optimizer.lr=" in printed.err
    best = yaml.safe_load((out / "best.yaml").read_text())
    assert best["name"] == "small-tuned" and best["optimizer"]["lr"] in (0.001, 0.01)
    page = (out / "report.html").read_text()
    assert page.count("<img ") == len([name for name in COMPARED if name != "Validation AUC"])
    assert run_command([*words, *over, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["finished"] and len(found["trials"]) == 2


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ([], "give at least one --over"),
        (["--over", "optimzer.lr=log(1e-4,1e-2)"], "did you mean 'optimizer.lr'"),
        (["--over", "model.dropout=choice(7)"], "no trial can run"),
    ],
)
def test_a_wrong_search_ends_in_one_sentence(words, tmp_path, capsys, over, message):
    out = tmp_path / "search"
    assert run_command([*words, *over, "--out", str(out)]) == 1
    assert message in capsys.readouterr().err
    assert not (out / "tune.json").exists()
