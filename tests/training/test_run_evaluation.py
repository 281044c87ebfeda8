"""An evaluation leaves its figures, slices and samples in run.json and in the report."""

import pytest

from slipstream.errors import SlipstreamError
from slipstream.files import read_json
from slipstream.training.run import open_run, train
from slipstream.training.run_evaluation import evaluate_run
from tests.support.training_fixtures import small_recipe, small_store

RANKING = {"task": "ranking", "tasks": {"click": {"column": "click"}}, "loss": {"kind": "bce"}}


def trained(tmp_path, **changes):
    """A run's directory, and the run opened."""
    store = small_store(tmp_path / "store", users=30, items=40)
    run = tmp_path / "run"
    train(small_recipe(**changes), store, run, quiet=True)
    return run, open_run(run, store)


def test_figures_slices_and_samples_are_kept(tmp_path):
    run, opened = trained(tmp_path)
    done = evaluate_run(run, *opened)
    note = read_json(run / "run.json")
    assert note["test"] == done.figures and note["test_slices"] == done.slices
    samples = note["test_samples"]
    assert len(samples) == 3 and all(len(sample["recommended"]) == 5 for sample in samples)
    assert samples[0]["truth"] not in samples[0]["history"] or samples[0]["hit"] is None
    page = (run / "report.html").read_text()
    assert f"User {samples[0]['user']}" in page and "popularity" in page


def test_another_rule_is_kept_under_its_own_name(tmp_path):
    run, opened = trained(tmp_path)
    own = evaluate_run(run, *opened).figures
    other = evaluate_run(run, *opened, repeat="allow").figures
    hidden = evaluate_run(run, *opened, protocol="no_request_time").figures
    note = read_json(run / "run.json")
    assert (note["test"], note["test_repeat_allow"]) == (own, other)
    assert note["test_no_request_time"] == hidden
    assert own["popularity HR@200"] < other["popularity HR@200"] == 1.0
    assert evaluate_run(run, *opened, repeat="exclude").figures == own


def test_a_ranking_run_has_the_baseline_of_its_items_rates(tmp_path):
    run, opened = trained(tmp_path, **RANKING)
    figures = evaluate_run(run, *opened).figures
    assert 0 <= figures["popularity AUC/click"] <= 1 and figures["repeats"] > 0
    assert figures["users"] == figures["behaviours"] > 0
    assert len(read_json(run / "run.json")["test_samples"]) == 3


@pytest.mark.parametrize(
    ("changes", "more", "sentence"),
    [
        (RANKING, {"protocol": "sampled"}, "needs a retrieval run"),
        ({}, {"protocol": "sampled", "repeat": "allow"}, "leave one out"),
        ({"split": {"validation": 1, "test": 50}}, {}, "nothing to evaluate"),
    ],
)
def test_what_cannot_be_evaluated_is_one_sentence(tmp_path, changes, more, sentence):
    run, opened = trained(tmp_path, **changes)
    with pytest.raises(SlipstreamError, match=sentence):
        evaluate_run(run, *opened, **more)
    assert "test" not in read_json(run / "run.json")
