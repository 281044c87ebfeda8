"""Runs are found and held against each other by their files alone."""

import os

import pytest

from slipstream.errors import SlipstreamError
from slipstream.training.comparison import compare_runs, find_runs, summarise_run
from slipstream.training.run_directory import sole_user
from tests.support.run_notes import write_note


def test_runs_are_found_below_a_folder_the_newest_first(tmp_path):
    for place, age in (("a", 300), ("deep/er/b", 100), ("c", 200)):
        note = write_note(tmp_path / place) / "run.json"
        os.utime(note, (note.stat().st_atime, note.stat().st_mtime - age))
    (tmp_path / "no-run").mkdir()
    assert [run.name for run in find_runs(tmp_path)] == ["b", "c", "a"]
    assert find_runs(tmp_path / "no-run") == []
    with pytest.raises(SlipstreamError, match="is no directory"):
        find_runs(tmp_path / "nowhere")


def test_a_running_run_without_its_process_was_interrupted(tmp_path):
    run = write_note(tmp_path / "run", status="running")
    assert summarise_run(run).status == "interrupted"
    with sole_user(run):
        assert summarise_run(run).status == "running"
    assert summarise_run(run).status == "interrupted"


def test_a_comparison_has_what_differs_and_the_best_of_each_figure(tmp_path):
    first = write_note(tmp_path / "a")
    recipe = {"name": "b", "seed": 1, "model": {"kind": "sasrec", "dim": 64}}
    second = write_note(tmp_path / "b", recipe=recipe, test={}, metrics={"HR@10": 0.3})
    found = compare_runs([first, second])
    assert found.keys == {"name": ["a", "b"], "model.kind": ["hstu", "sasrec"]}
    assert found.validation["HR@10"] == [0.25, 0.3] and found.test["HR@10"] == [0.24, None]
    assert found.best == {"validation HR@10": [1], "validation NDCG@10": [0], "test HR@10": [0]}
    assert found.same_data
    assert not compare_runs([first, write_note(tmp_path / "c", digest="d2")]).same_data


def test_figures_of_ranking_are_best_where_they_are_high_and_entropy_where_it_is_low(tmp_path):
    high = {"AUC/click": 0.7, "NE/click": 0.9, "AUC": 0.7, "NE": 0.9}
    low = {"AUC/click": 0.6, "NE/click": 1.1, "AUC": float("nan"), "NE": 1.1}
    runs = [write_note(tmp_path / name, metrics=m) for name, m in (("a", low), ("b", high))]
    best = compare_runs(runs).best
    assert {best[f"validation {name}"][0] for name in high} == {1}


@pytest.mark.parametrize(("count", "sentence"), [(1, "at least two runs"), (2, "holds no run")])
def test_what_cannot_be_compared_is_one_sentence(tmp_path, count, sentence):
    run = write_note(tmp_path / "a")
    with pytest.raises(SlipstreamError, match=sentence):
        compare_runs([run, tmp_path][:count])
