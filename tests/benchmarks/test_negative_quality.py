"""The study of negatives: every option trains, finished runs are kept, the table pairs seeds."""

import json

import pytest

from benchmarks.command import function_app
from benchmarks.negative_quality import command
from benchmarks.negative_quality import study as negatives
from benchmarks.negative_quality.study import BASELINE, OPTIONS, as_table, run_study
from benchmarks.staleness.cases import QUICK, open_store
from slipstream.cli.app import run_command
from slipstream.errors import SlipstreamError


@pytest.fixture
def store(tmp_path):
    return open_store(QUICK, tmp_path, tmp_path)


def test_every_option_trains_and_is_evaluated_once(store, tmp_path):
    reports = []
    table = run_study(
        store,
        tmp_path / "out",
        seeds=[1],
        epochs=1,
        progress=lambda *report: reports.append(report),
    )
    assert (tmp_path / "out" / "negatives.md").read_text() == table
    results = [json.loads(path.read_text()) for path in (tmp_path / "out").glob("*.json")]
    assert {result["option"] for result in results} == set(OPTIONS) and len(
        table.splitlines()
    ) == 2 + len(OPTIONS)
    assert {report[0] for report in reports} == {f"{name}, seed 1" for name in OPTIONS}
    assert all(report[1] <= report[2] == results[0]["steps"] for report in reports)
    by_option = {result["option"]: result for result in results}
    assert by_option["128 own, in-batch"]["negative_rows"] == 0  # its negatives are there anyway
    assert all(0 <= result["HR@10"] <= 1 and result["step_cpu_seconds"] > 0 for result in results)


def test_finished_runs_are_kept_and_another_seed_is_not_one(store, tmp_path, monkeypatch):
    choice = {"options": [BASELINE, "32 own"], "epochs": 1}
    first = run_study(store, tmp_path, seeds=[1], **choice)
    trained = []
    original = negatives.one_run
    monkeypatch.setattr(
        negatives,
        "one_run",
        lambda recipe, *rest: trained.append(recipe.seed) or original(recipe, *rest),
    )
    assert run_study(store, tmp_path, seeds=[1], **choice) == first and trained == []
    figures = [
        row.split("|")[2] for row in run_study(store, tmp_path, seeds=[1, 2], **choice).splitlines()
    ]
    assert trained == [2, 2]
    run_study(store, tmp_path, seeds=[1], options=[BASELINE], epochs=2)
    assert trained == [2, 2, 1]
    next(
        path for path in tmp_path.glob("*.json") if json.loads(path.read_text())["seed"] == 2
    ).unlink()  # lost: trained again
    assert [
        row.split("|")[2] for row in run_study(store, tmp_path, seeds=[1, 2], **choice).splitlines()
    ] == figures
    assert trained == [2, 2, 1, 2]


def test_differences_are_paired_by_seed():
    cost = {"NDCG@10": 0.1, "step_cpu_seconds": 1.0, "negative_rows": 5.0}
    found = {
        BASELINE: [{"HR@10": 0.2, **cost}, {"HR@10": 0.4, **cost}],
        "32 own": [{"HR@10": 0.1, **cost}, {"HR@10": 0.3, **cost, "step_cpu_seconds": 0.5}],
    }
    rows = as_table(found).splitlines()
    assert rows[2] == "| 128 own | 0.3000 ± 0.1414 | 0.1000 ± 0.0000 |  | 1.00x | 5 |"
    assert (
        rows[3] == "| 32 own | 0.2000 ± 0.1414 | 0.1000 ± 0.0000 | -0.1000 ± 0.0000 | 0.75x | 5 |"
    )


def test_an_unknown_option_is_named(store, tmp_path, capsys, monkeypatch):
    with pytest.raises(
        SlipstreamError, match="unknown option '32 owm' of the study; did you mean '32 own'"
    ):
        run_study(store, tmp_path / "out", options=["32 owm"])
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(command, "open_store", lambda *arguments: store)
    words = ["--options", "32 owm", "--out", str(tmp_path / "out")]
    assert run_command(words, function_app(command.negative_quality)) == 1
    assert "error: " in capsys.readouterr().err


def test_every_option_is_a_recipe():
    for option in OPTIONS:
        assert negatives.recipe_of(option, 1).loss.negatives >= 32
