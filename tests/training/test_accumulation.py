"""Several batches a step train like one large batch; bf16 learns like fp32; both decide digests."""

import json

import pytest
import torch

from slipstream.errors import SlipstreamError
from slipstream.training.recipe import trained_digest
from slipstream.training.recommender import Recommender
from slipstream.training.run import train
from tests.support.ranks_fixtures import run_ranks
from tests.support.shrunk_recipes import trained
from tests.support.training_fixtures import (
    logged_losses,
    same_tensors,
    small_recipe,
    small_store,
)

BATCH = 2  # users of a batch; the last of an epoch is smaller


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("store"), users=14, items=60)


def recipe_of(accumulate, batch=BATCH, loss=(), **options):
    return small_recipe(
        loss={"negatives": 6, **dict(loss)},
        sampler={"batch_size": batch},
        tables={"optimizer": "rowwise_adam"},
        optimizer={"decay": "cosine", "warmup_steps": 2, "clip_norm": 1.0},
        train={"epochs": 3, "log_every": 1, "evaluate_every": 3, "accumulate": accumulate}
        | {"checkpoint_every": 2, "schedule": "synchronous", "tensorboard": False, **options},
    )


def run_of(store, place, recipe, dtype=torch.float64):
    result = train(recipe, store, place, quiet=True, dtype=dtype)
    return trained(place), logged_losses(place), (result.step, result.epoch)


def distance(one, other):
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


SEGMENTED = {"fetch": "segmented", "segment_bytes": 4096}
FREE = recipe_of(3)
FREE = FREE.model_copy(
    update={"optimizer": FREE.optimizer.model_copy(update={"decay": "constant"})}
)
RANKED = {
    "large": recipe_of(1, 3 * BATCH),
    "plain": recipe_of(3),
    "segmented": recipe_of(3, loss=SEGMENTED),
}


@pytest.mark.system
@pytest.mark.parametrize("loss", [{}, SEGMENTED], ids=["whole", "segmented"])
def test_three_batches_a_step_are_one_batch_three_times_as_large(store, tmp_path, loss):
    large = run_of(store, tmp_path / "large", recipe_of(1, 3 * BATCH, loss))
    ours = run_of(store, tmp_path / "ours", recipe_of(3, loss=loss))
    assert distance(ours[0], large[0]) < 1e-12 and ours[2] == large[2] and ours[2][1] == 3
    assert [step for step, _ in ours[1]] == [step for step, _ in large[1]]
    assert [each for _, each in ours[1]] == pytest.approx([each for _, each in large[1]], rel=1e-12)


@pytest.mark.system
def test_schedules_compute_the_parts_of_the_plain_loop(store, tmp_path):
    plain = run_of(store, tmp_path / "plain", recipe_of(3))[0]
    for schedule in ("dual_buffer", "frozen_window", "nested"):
        recipe = recipe_of(3, schedule=schedule, micro_batches=1, cluster=False)
        assert same_tensors(run_of(store, tmp_path / schedule, recipe)[0], plain), schedule
    assert distance(run_of(store, tmp_path / "cut", recipe_of(3, schedule="nested"))[0], plain) < (
        1e-12
    )


@pytest.mark.system
def test_an_interrupted_run_goes_on_with_whole_steps(store, tmp_path):
    whole = run_of(store, tmp_path / "whole", FREE)
    stopped = FREE.model_copy(update={"train": FREE.train.model_copy(update={"max_steps": 1})})
    assert run_of(store, tmp_path / "cut", stopped)[2] == (1, 0)
    again = run_of(store, tmp_path / "cut", FREE)
    assert same_tensors(again[0], whole[0]) and again[1:] == whole[1:]


def on_ranks(rank, world, directory, place):
    from slipstream.data.store import SequenceStore

    store = SequenceStore.open(directory)
    for name, recipe in RANKED.items():
        train(recipe, store, f"{place}/{name}", quiet=True, dtype=torch.float64)
    return {}


@pytest.mark.system
def test_two_ranks_accumulate_like_one_large_batch(store, tmp_path):
    """A rank's part of the last step of an epoch may have no samples."""
    place = str(tmp_path / "runs")
    run_ranks(2, f"{__name__}:on_ranks", tmp_path, directory=str(store.directory), place=place)
    found = {name: trained(tmp_path / "runs" / name) for name in RANKED}
    assert distance(found["plain"], found["large"]) < 1e-12
    assert distance(found["segmented"], found["plain"]) < 1e-11
    status = json.loads((tmp_path / "runs" / "plain" / "run.json").read_text())
    assert (status["status"], status["epoch"]) == ("finished", 3)


@pytest.mark.system
def test_the_loss_of_bf16_stays_within_two_percent_of_fp32(store, tmp_path):
    """60 steps: the losses fall alike, and every one lies in the band."""
    losses = {}
    for precision in ("fp32", "bf16"):
        recipe = recipe_of(1, 7, epochs=30, evaluate_every=0, precision=precision)
        losses[precision] = [
            each for _, each in run_of(store, tmp_path / precision, recipe, torch.float32)[1]
        ]
    assert losses["fp32"][-1] < 0.9 * losses["fp32"][0] and losses["fp32"] != losses["bf16"]
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.02)


def test_what_decides_numbers_decides_the_digest():
    plain = trained_digest(recipe_of(1))
    assert trained_digest(recipe_of(1, activation_checkpointing=True)) == plain
    changed = {trained_digest(recipe_of(2)), trained_digest(recipe_of(1, precision="bf16"))}
    assert len(changed | {plain}) == 3


def test_a_loss_that_mixes_samples_is_refused(store):
    with pytest.raises(SlipstreamError, match=r"train.accumulate computes parts of a step"):
        Recommender.build(recipe_of(2, loss={"share": 2, "share_within": "batch"}), store)
