"""A bundle in Python: it needs no store, and says what it is."""

import pytest

import slipstream as ss
from slipstream.bundle import read_bundle
from slipstream.errors import SlipstreamError
from tests.support.api_runs import prepare_and_train


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> ss.Run:
    run = prepare_and_train(tmp_path_factory.mktemp("bundle"), "text")
    run.export(run.directory.parent / "bundle")
    return run


def test_a_bundle_answers_for_histories_without_a_store(run):
    model = ss.load(str(run.directory.parent / "bundle"))
    found = model.recommend(histories=["LAM/00", "🦊/01"], k=3)
    assert len(found) == 3 and not set(found["item"]) & {"LAM/00", "🦊/01"}
    assert found["title"].to_list() == [f"Title of {item}" for item in found["item"]]
    with pytest.raises(SlipstreamError, match="a bundle holds no users; give histories"):
        model.recommend("c/1")


def test_a_bundle_takes_users_from_a_store_or_its_directory(run):
    place = run.directory.parent
    for data in (run.store, place / "store", str(place / "store")):
        found = ss.BundleModel(place / "bundle", data).recommend("c/1", k=3)
        assert found.equals(run.recommend("c/1", k=3))


def test_a_bundle_shows_what_it_is(run):
    model = ss.BundleModel(run.directory.parent / "bundle")
    assert model.version == read_bundle(run.directory.parent / "bundle").version
    assert model.version in repr(model) and "hstu, width 8" in repr(model)
    assert "<td>items</td><td>12</td>" in model._repr_html_()


def test_what_is_no_bundle_is_refused(run):
    with pytest.raises(SlipstreamError, match="is not a bundle"):
        ss.BundleModel(run.directory)


@pytest.mark.parametrize("repeat, excludes", [("exclude", True), ("allow", False)])
def test_a_bundle_recommends_what_the_servers_engine_retrieves(run, repeat, excludes):
    place = run.directory.parent
    model, engine = ss.BundleModel(place / "bundle", run.store), ss.Engine(place / "bundle")
    for row in range(run.store.num_users):
        start, end = run.store.offsets_U1[row : row + 2]
        items = [run.items.id(item) for item in run.store.items_N[start:end]]
        history = ss.History(items, run.store.timestamps_N[start:end].tolist())
        found = model.recommend(run.store.users.id(row), k=5, repeat=repeat)
        items, scores = engine.retrieve(history, 5, exclude_seen=excludes)
        assert found["item"].to_list() == items
        assert found["score"].to_list() == pytest.approx(scores, abs=1e-5)
