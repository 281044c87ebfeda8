"""The recorder writes what the loop's hooks give it."""

import threading

import pytest

from slipstream.data.loader import PrefetchingLoader
from slipstream.data.sampler import TrainingSampler
from slipstream.training import checkpoint
from slipstream.training.loop import Progress
from slipstream.training.optimizers import make_adamw
from slipstream.training.recommender import Recommender
from slipstream.training.recorder import Recorder, step_flops
from slipstream.training.telemetry import read_metrics
from tests.support.training_fixtures import small_recipe, small_store


@pytest.fixture
def recorder(tmp_path):
    recipe, store = small_recipe(), small_store(tmp_path / "store")
    ours = Recommender.build(recipe, store)
    sampler = TrainingSampler(store, recipe.sampler, seed=recipe.seed, split=recipe.split)
    with PrefetchingLoader(sampler) as loader:
        optimizer = make_adamw(ours.model, recipe.optimizer)
        found = Recorder(tmp_path, ours, optimizer, loader, Progress(), quiet=True)
        yield found
        found.close()


def test_a_logged_step_becomes_a_line_of_metrics(recorder, tmp_path):
    hooks = recorder.hooks(None, threading.Event())
    recorder.progress.step = 2
    hooks.on_step(recorder.progress, recorder.loader.next_batch())
    hooks.on_log(recorder.progress, {"loss": 1.5, "lr": 0.1})
    (line,) = read_metrics(tmp_path / "metrics.jsonl")
    assert (line["step"], line["loss"], line["lr"]) == (2, 1.5, 0.1)
    assert line["tokens_per_second"] > 0 and line["mfu"] > 0


def test_only_the_best_evaluation_keeps_its_weights(recorder, tmp_path):
    for step, is_best in ((1, True), (2, False)):
        recorder.progress.step, recorder.progress.metrics = step, {"HR@10": 0.5}
        recorder.on_evaluation(recorder.progress, is_best)
    recorder.checkpoints.wait()
    best = checkpoint.list_checkpoints(tmp_path / "checkpoints", checkpoint.BEST)
    assert [path.name for path in best] == ["best-00000001"]
    assert [line["best"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [True, False]


def test_a_checkpoint_holds_the_position_of_the_batches_used(recorder, tmp_path):
    recorder.loader.next_batch()
    recorder.progress.step = 1
    recorder.save(recorder.progress)
    recorder.checkpoints.wait()
    state = checkpoint.read_state(checkpoint.latest(tmp_path / "checkpoints"))
    assert state["sampler"]["step"] == 1 and state["progress"]["step"] == 1


def test_longer_batches_are_worth_more_flops(recorder):
    batch = recorder.loader.next_batch()
    one = batch.take(batch.lengths_B.argmax().view(1))
    assert 0 < step_flops(recorder.recommender, one) < step_flops(recorder.recommender, batch)
