"""A run in Python: its answers, its evaluation, its curves, its bundle."""

import json
import re
import shutil
from pathlib import Path

import pytest

import slipstream as ss
from slipstream.bundle import read_bundle
from slipstream.errors import SlipstreamError
from slipstream.files import read_json, write_json
from tests.support.tiny_runs import BIG, prepare_and_train


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    return prepare_and_train(tmp_path_factory.mktemp("api"))


def test_export_returns_the_path_that_the_engine_opens(workplace):
    bundle = ss.Run(workplace / "run").export(workplace / "bundle")
    assert bundle == workplace / "bundle"
    assert ss.Engine(bundle).version == read_bundle(bundle).version


def test_a_run_is_opened_by_a_path_or_a_text(workplace):
    run = ss.Run(str(workplace / "run"))
    assert run == ss.Run(workplace / "run") and run.directory == workplace / "run"
    assert run.export(str(workplace / "other")) == Path(workplace / "other")


def test_export_refuses_what_it_must_not_replace(workplace):
    run, out = ss.Run(workplace / "run"), workplace / "twice"
    for target in (run.directory, run.store.directory):
        with pytest.raises(SlipstreamError, match=r"own input|must not replace"):
            run.export(target, force=True)
    run.export(out)
    with pytest.raises(SlipstreamError, match="exists already"):
        run.export(out)
    assert run.export(out, force=True) == out


def test_a_run_has_its_recipe_store_and_recommender(workplace):
    run = ss.Run(workplace / "run")
    assert run.recipe.model.dim == 8
    assert run.store.num_users == 20
    assert run.recommender.features.num_items == run.store.num_items


def test_evaluate_writes_its_figures_to_the_run(workplace):
    run = ss.Run(workplace / "run")
    figures = run.evaluate("validation", protocol="sampled")
    assert read_json(run.directory / "run.json")["validation_sampled"] == figures


def test_a_protocol_of_retrieval_is_refused_for_ranking(workplace, monkeypatch):
    run = ss.Run(workplace / "run")
    ranking = run.recipe.model_copy(update={"task": "ranking"})
    monkeypatch.setitem(run.__dict__, "_opened", (ranking, run.store, run.recommender))
    with pytest.raises(SlipstreamError, match="protocol 'sampled' ranks items"):
        run.evaluate(protocol="sampled")


def test_recommend_answers_with_original_ids(workplace):
    run = ss.Run(workplace / "run")
    answer = run.recommend(BIG - 3, k=2)
    assert answer["user"].to_list() == [BIG - 3] * 2
    assert all(item > BIG - 40 for item in answer["item"])


def test_figures_are_a_dict_with_a_frame_and_a_readable_face(workplace):
    figures = ss.Run(workplace / "run").evaluate("test")
    assert isinstance(figures, dict) and json.loads(json.dumps(figures)) == figures
    assert figures.frame.columns == ["metric", "value"]
    assert dict(figures.frame.rows()) == figures
    text = repr(figures)
    assert text.startswith("run, test\n") and "HR@10" in text
    assert re.search(r"users +20$", text, re.MULTILINE), "a count is no share"
    assert "<td>HR@10</td>" in figures._repr_html_()


def test_evaluate_by_another_rule_is_kept_apart(workplace):
    run = ss.Run(workplace / "run")
    usual = run.evaluate("test")
    run.evaluate("test", repeat="allow")
    note = read_json(run.directory / "run.json")
    assert note["test"] == usual and "test_repeat_allow" in note


def test_evaluate_takes_metrics_of_ones_own(workplace):
    seen = []

    def hits_at_10(places):
        seen.append(places)
        return float((places <= 10).double().mean())

    figures = ss.Run(workplace / "run").evaluate("test", metric=hits_at_10)
    assert figures["hits_at_10"] == pytest.approx(figures["HR@10"])
    assert seen[0].shape == (20,) and float(seen[0].min()) >= 1


def test_metrics_are_the_curves_of_training(workplace):
    run = ss.Run(workplace / "run")
    curves = run.metrics
    assert curves["step"].is_sorted() and "validation HR@10" in curves.columns
    last = curves.filter(curves["best"])["validation HR@10"][-1]
    assert last == run.note["metrics"]["HR@10"]


def test_a_run_shows_what_it_is(workplace):
    run = ss.Run(workplace / "run")
    assert "hstu, width 8" in repr(run) and "finished" in repr(run)
    page = run._repr_html_()
    assert page.startswith("<table>") and "hstu, width 8" in page


def test_runs_are_equal_by_their_directory(workplace):
    assert len({ss.Run(workplace / "run"), ss.Run(str(workplace / "run"))}) == 1


def test_a_run_whose_store_was_moved_is_opened_with_data(workplace, tmp_path):
    shutil.copytree(workplace / "run", tmp_path / "run")
    shutil.copytree(workplace / "store", tmp_path / "moved")
    note = read_json(tmp_path / "run" / "run.json")
    note["store"] |= {"directory": "/nowhere", "from_run": "../gone"}
    write_json(tmp_path / "run" / "run.json", note)
    with pytest.raises(SlipstreamError, match="with data DIR"):
        ss.load(tmp_path / "run").recommend(BIG - 3)
    moved = ss.load(tmp_path / "run", data=str(tmp_path / "moved"))
    here = ss.Run(workplace / "run").recommend(BIG - 3)
    assert moved.recommend(BIG - 3).equals(here)
