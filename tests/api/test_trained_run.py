"""The Python functions behind the commands: what they return and what they refuse."""

from pathlib import Path

import pytest

import slipstream as ss
from slipstream import api
from slipstream.bundle import read_bundle
from slipstream.errors import SlipstreamError
from slipstream.files import read_json
from tests.support.tiny_runs import BIG, prepare_and_train
from tests.support.training_fixtures import small_recipe, small_store


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


def test_recommend_takes_the_original_id(workplace):
    answer = ss.Run(workplace / "run").recommend(BIG - 3, count=2)
    assert len(answer.items) == 2


def test_a_store_is_given_as_itself_or_as_its_directory(workplace):
    store = api.open_store(workplace / "store")
    assert api.open_store(store) is store
    with pytest.raises(SlipstreamError, match="the recipe names no data"):
        api.open_store(None)


def test_a_recipe_object_takes_no_overrides(tmp_path):
    with pytest.raises(SlipstreamError, match="model_copy"):
        ss.train(small_recipe(), "max_steps=1", data=small_store(tmp_path / "store"))


def test_settings_change_keys_of_a_shipped_recipe(tmp_path, workplace):
    small = {"model__dim": 8, "heads": 1, "blocks": 1, "negatives": 4, "threads": 1}
    run = ss.train(
        "ml-1m-hstu", data=workplace / "store", out=tmp_path / "run", max_steps=1, **small
    )
    assert read_json(run.directory / "run.json")["step"] == 1
    assert run.report().is_file()
