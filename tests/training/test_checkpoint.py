"""Checkpoints: whole or absent, the newest few kept, and refused where they do not fit."""

import json
import resource

import pytest
import torch

from slipstream.errors import SlipstreamError
from slipstream.training import checkpoint
from slipstream.training.run import open_run, train
from tests.support.training_fixtures import same_tensors, saved_tensors, small_recipe, small_store


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("data") / "store")


def test_only_the_last_checkpoints_are_kept(store, tmp_path):
    recipe = small_recipe(
        train={"max_steps": 7, "epochs": 50, "checkpoint_every": 2, "keep_last": 2}
    )
    train(recipe, store, tmp_path / "run", quiet=True)
    kept = [path.name for path in checkpoint.list_checkpoints(tmp_path / "run" / "checkpoints")]
    assert kept == ["step-00000006", "step-00000007"]


def test_a_checkpoint_of_another_model_is_refused(store, tmp_path):
    from slipstream.training.recommender import Recommender

    train(small_recipe(), store, tmp_path / "run", quiet=True)
    newest = checkpoint.latest(tmp_path / "run" / "checkpoints")
    for changes in (
        {"model": {"blocks": 2}},
        {"tables": {"optimizer": "adamw"}},
        {"item_features": ["genre"]},
    ):
        with pytest.raises(SlipstreamError, match="written by another model"):
            checkpoint.load_weights(newest, Recommender.build(small_recipe(**changes), store))
    smaller = small_store(tmp_path / "smaller", items=14)  # a larger one may have grown
    with pytest.raises(SlipstreamError, match="do not fit"):
        checkpoint.load_weights(newest, Recommender.build(small_recipe(), smaller))
    (newest / checkpoint.TENSORS).write_bytes(b"torn")
    with pytest.raises(SlipstreamError, match="not a readable checkpoint"):
        checkpoint.load_weights(newest, Recommender.build(small_recipe(), store))


def test_a_full_disk_leaves_the_old_checkpoint_loadable(store, tmp_path):
    train(small_recipe(train={"max_steps": 3}), store, tmp_path / "run", quiet=True)
    before = saved_tensors(tmp_path / "run")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (checkpoint.latest(tmp_path / "run" / "checkpoints") / checkpoint.TENSORS).stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, limits[1]))
    try:
        with pytest.raises(SlipstreamError, match="could not write"):
            train(small_recipe(train={"max_steps": 4}), store, tmp_path / "run", quiet=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert same_tensors(before, saved_tensors(tmp_path / "run"))
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"
    assert (
        train(small_recipe(train={"max_steps": 4}), store, tmp_path / "run", quiet=True).step == 4
    )


@pytest.mark.parametrize("directory", [None, "rows"])
def test_ids_that_wait_for_a_row_are_remembered_by_a_resumed_run(tmp_path, directory):
    store = small_store(tmp_path / "store", users=40, items=300)

    def recipe(steps, name):
        place = None if directory is None else str(tmp_path / name / directory)
        tables = {"tier": "hashed", "admit_after": 3, "directory": place}
        return small_recipe(tables=tables, train={"max_steps": steps, "epochs": 9})

    train(recipe(12, "whole"), store, tmp_path / "whole", quiet=True)
    for steps in (5, 12):
        train(recipe(steps, "resumed"), store, tmp_path / "resumed", quiet=True)
    whole, resumed = (
        open_run(tmp_path / name, store, which="last")[2] for name in ("whole", "resumed")
    )
    assert torch.equal(whole.catalogue_ND(), resumed.catalogue_ND())
    left, right = (ours.tables["item"].admission() for ours in (whole, resumed))
    assert left["candidates"].numel() > 0
    for name, value in left.items():
        assert torch.equal(value.sort()[0], right[name].sort()[0])
