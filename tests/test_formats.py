"""Stores, checkpoints and bundles name their format: an earlier one opens, another is refused.

Each refusal is one sentence that says what is wrong and what to do.
"""

import json

import pytest
import torch
from safetensors.torch import load_file

from slipstream import bundle
from slipstream.data import store as stores
from slipstream.errors import SlipstreamError
from slipstream.tables.disk_files import MANIFEST
from slipstream.training import checkpoint
from slipstream.training.export import export_recommender
from slipstream.training.recommender import Recommender
from slipstream.training.run import open_run, train
from tests.support.training_fixtures import small_recipe, small_store


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A store, a run on it and its bundle."""
    place = tmp_path_factory.mktemp("formats")
    store = small_store(place / "store")
    train(small_recipe(train={"max_steps": 2}), store, place / "run", quiet=True)
    export_recommender(open_run(place / "run", store)[2], store, place / "bundle")
    return place


def with_format(path, number):
    """Make a description say another format; return what it said."""
    before = json.loads(path.read_text())
    path.write_text(json.dumps(before | {"format": number}))
    return before


def places(made):
    """Where each kind keeps its description, and what opens it."""
    newest = checkpoint.latest(made / "run" / "checkpoints")
    store, exported = made / "store", made / "bundle"
    return {
        "store": (store / "store.json", lambda: stores.SequenceStore.open(store)),
        "checkpoint": (newest / checkpoint.STATE, lambda: checkpoint.read_state(newest)),
        "bundle": (exported / bundle.DESCRIPTION, lambda: bundle.read_bundle(exported)),
    }


@pytest.mark.parametrize(
    ("kind", "format_", "readable"),
    [
        ("store", stores.FORMAT, stores.READABLE),
        ("checkpoint", checkpoint.FORMAT, checkpoint.READABLE),
        ("bundle", bundle.FORMAT, bundle.READABLE),
    ],
)
def test_what_is_written_names_its_format_and_an_unknown_one_is_refused(
    made, kind, format_, readable
):
    path, open_it = places(made)[kind]
    open_it()
    assert format_ in readable
    before = with_format(path, 99)
    try:
        assert before["format"] == format_
        with pytest.raises(SlipstreamError, match=f"not a {kind} of format .*; ") as refused:
            open_it()
    finally:
        path.write_text(json.dumps(before))
    assert str(refused.value).count(". ") == 0


def test_a_store_of_the_format_before_opens(made):
    path, open_it = places(made)["store"]
    before = with_format(path, stores.FORMAT - 1)
    try:
        assert open_it().num_items > 0
    finally:
        path.write_text(json.dumps(before))


def test_a_bundle_of_the_format_before_opens(made):
    path, open_it = places(made)["bundle"]
    before = with_format(path, bundle.FORMAT - 1)
    earlier = json.loads(path.read_text())
    del earlier["digests"]  # they are younger
    path.write_text(json.dumps(earlier))
    try:
        assert open_it().tensors
    finally:
        path.write_text(json.dumps(before))


def test_a_bundle_whose_format_was_changed_is_refused(made):
    path, open_it = places(made)["bundle"]
    before = with_format(path, bundle.FORMAT - 1)
    try:
        with pytest.raises(SlipstreamError, match="was changed after it was written"):
            open_it()
    finally:
        path.write_text(json.dumps(before))


def test_a_checkpoint_of_the_format_before_loads_and_goes_on(made, tmp_path):
    store = stores.SequenceStore.open(made / "store")
    train(small_recipe(train={"max_steps": 2}), store, tmp_path / "run", quiet=True)
    newest = checkpoint.latest(tmp_path / "run" / "checkpoints")
    state = json.loads((newest / checkpoint.STATE).read_text())
    for name in ("row_tables", "row_files"):  # younger than format 1, which was otherwise the same
        state.pop(name)
    (newest / checkpoint.STATE).write_text(json.dumps(state | {"format": 1}))
    recommender = Recommender.build(small_recipe(), store)
    checkpoint.load_weights(newest, recommender)
    whole = load_file(newest / checkpoint.TENSORS)
    assert torch.equal(recommender.tables["item"].all_rows(), whole["tables/item/weights"])
    for place in (tmp_path / "run", made / "run"):
        train(small_recipe(train={"max_steps": 4}), store, place, quiet=True)
    one, two = (open_run(place, store, "last")[2] for place in (tmp_path / "run", made / "run"))
    assert torch.equal(one.catalogue_ND(), two.catalogue_ND())
    assert checkpoint.read_state(checkpoint.latest(tmp_path / "run" / "checkpoints"))["format"] == 2


def test_files_of_a_table_of_another_format_are_refused(made, tmp_path):
    tables = {"tier": "disk", "directory": str(tmp_path / "rows")}
    recommender = Recommender.build(
        small_recipe(tables=tables), stores.SequenceStore.open(made / "store")
    )
    recommender.tables["item"].flush()
    recommender.tables.close()
    with_format(tmp_path / "rows" / "item" / MANIFEST, 99)
    with pytest.raises(SlipstreamError, match="does not describe a table of format 1; remove"):
        Recommender.build(small_recipe(tables=tables), stores.SequenceStore.open(made / "store"))
