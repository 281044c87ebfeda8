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
