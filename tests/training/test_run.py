"""A run directory: repeatable, resumable, exact in length, and closed to strangers."""

import json
import os
import signal
import threading

import pytest
import torch
import yaml

from slipstream.errors import SlipstreamError
from slipstream.training.recipe import Recipe
from slipstream.training.run import open_run, sole_user, train
from slipstream.training.telemetry import read_metrics
from tests.support.training_fixtures import (
    growing,
    logged_losses,
    same_tensors,
    saved_tensors,
    small_recipe,
    small_store,
)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("data") / "store")


def test_same_seed_twice_is_identical_and_another_seed_is_not(store, tmp_path):
    runs = [tmp_path / name for name in ("one", "two", "three")]
    for run_dir, seed in zip(runs, (1, 1, 2), strict=True):
        assert train(small_recipe(seed=seed), store, run_dir, quiet=True).status == "finished"
    assert same_tensors(saved_tensors(runs[0]), saved_tensors(runs[1])) and logged_losses(
        runs[0]
    ) == logged_losses(runs[1])
    assert not same_tensors(saved_tensors(runs[0]), saved_tensors(runs[2]))


RANKING = {
    "task": "ranking",
    "tasks": {"click": {"column": "click"}},
    "loss": {"kind": "bce"},
    "user_features": ["age"],
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model": {"kind": "fuxi"}, "tables": {"optimizer": "adamw"}},
        {"model": {"kind": "fuxi", "time_encoding": "functional"}},
        RANKING,
    ],
)
def test_a_lengthened_run_ends_where_the_long_run_ends(store, tmp_path, changes):
    short, long = (
        small_recipe(**changes, train={"max_steps": steps, "epochs": 50}) for steps in (3, 9)
    )
    train(long, store, tmp_path / "at once", quiet=True)
    train(short, store, tmp_path / "in two", quiet=True)
    assert train(long, store, tmp_path / "in two", quiet=True).step == 9
    assert same_tensors(saved_tensors(tmp_path / "at once"), saved_tensors(tmp_path / "in two"))
    assert logged_losses(tmp_path / "at once") == logged_losses(tmp_path / "in two")


def test_a_functional_time_encoding_trains(store, tmp_path):
    model = {"kind": "fuxi", "time_encoding": "functional", "dropout": 0.0, "input_dropout": 0.0}
    recipe = small_recipe(model=model, optimizer={"lr": 1e-2}, train={"epochs": 40, "log_every": 1})
    train(recipe, store, tmp_path / "run", quiet=True)
    losses = [loss for _, loss in logged_losses(tmp_path / "run")]
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    found = saved_tensors(tmp_path / "run")["model/backbone.layers.0.relative.decay_3"]
    assert ((found - torch.tensor([0.02, 0.0, -1.0986])).abs() > 1e-3).all()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_cleanly_and_the_run_goes_on_later(store, tmp_path, number, capsys):
    recipe = small_recipe(train={"epochs": 4, "evaluate_every": 1})
    train(recipe, store, tmp_path / "whole", evaluate=growing([0.1]), quiet=True)
    rest = {"HR@10": 0.1, "NDCG@10": 0.0}

    def evaluate_then_interrupt(recommender, store, recipe, which):
        os.kill(os.getpid(), number)
        return rest

    before = signal.getsignal(number)
    result = train(recipe, store, tmp_path / "cut", evaluate=evaluate_then_interrupt)
    assert (result.status, result.epoch) == ("interrupted", 1)
    assert "run the same command again" in capsys.readouterr().err
    assert signal.getsignal(number) is before
    assert (
        train(
            recipe,
            store,
            tmp_path / "cut",
            evaluate=lambda *_: {"HR@10": 0.0, "NDCG@10": 0.0},
            quiet=True,
        ).status
        == "finished"
    )
    assert same_tensors(
        saved_tensors(tmp_path / "whole"), saved_tensors(tmp_path / "cut")
    ) and logged_losses(tmp_path / "whole") == logged_losses(tmp_path / "cut")


def test_run_directory_tells_what_it_is(store, tmp_path):
    recipe = small_recipe(train={"tensorboard": True, "log_every": 1})
    train(recipe, store, tmp_path / "run", quiet=True)
    assert (
        Recipe.model_validate(yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text()))
        == recipe
    )
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (
        run["status"] == "finished"
        and run["seconds"] > 0
        and run["versions"]["torch"] == torch.__version__
    )
    record = read_metrics(tmp_path / "run" / "metrics.jsonl")[0]
    assert (
        record["tokens_per_second"] > 0
        and 0 < record["mfu"] < 1
        and record["memory_bytes"] > 1e7
        and record["lr"] == 1e-3
    )
    assert [
        path for path in (tmp_path / "run" / "tensorboard").iterdir() if path.stat().st_size > 100
    ]


def test_strangers_are_refused(store, tmp_path):
    train(small_recipe(), store, tmp_path / "run", quiet=True)
    with pytest.raises(SlipstreamError, match="run of another recipe"):
        train(small_recipe(seed=4), store, tmp_path / "run", quiet=True)
    other = small_store(tmp_path / "other", seed=1)
    with pytest.raises(SlipstreamError, match="on other data"):
        train(small_recipe(), other, tmp_path / "run", quiet=True)
    with (
        sole_user(tmp_path / "run"),
        pytest.raises(SlipstreamError, match="another process works"),
    ):
        train(small_recipe(), store, tmp_path / "run", quiet=True)
    (tmp_path / "run" / "run.json").unlink()
    with pytest.raises(SlipstreamError, match="whose they are is not known"):
        train(small_recipe(), store, tmp_path / "run", quiet=True)
    with pytest.raises(SlipstreamError, match="does not exist"):
        open_run(tmp_path / "nowhere", store)


def test_what_the_store_cannot_give_is_refused(store, tmp_path):
    for changes, sentence in (
        ({"item_features": ["gnere"]}, "no item feature 'gnere'; did you mean 'genre'"),
        (
            {"task": "ranking", "tasks": {"x": {"column": "clik"}}, "loss": {"kind": "bce"}},
            "no action column 'clik'; did you mean 'click'",
        ),
        ({"sampler": {"max_len": 9}}, "longer than model.max_len"),
    ):
        with pytest.raises(SlipstreamError, match=sentence):
            train(small_recipe(**changes), store, tmp_path / "refused", quiet=True)
    with pytest.raises(SlipstreamError, match="no figure 'HR@11'"):
        train(
            small_recipe(train={"evaluate_every": 1, "metric": "HR@11"}),
            store,
            tmp_path / "m",
            evaluate=growing([1]),
            quiet=True,
        )


def test_one_rank_of_torchrun_is_a_plain_run(store, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert (
        train(small_recipe(train={"max_steps": 1}), store, tmp_path / "one", quiet=True).step == 1
    )
    assert not torch.distributed.is_initialized()
    with pytest.raises(SlipstreamError, match="mesh 2x2 needs 4 ranks, but 1 was started"):
        train(small_recipe(train={"mesh": "2x2"}), store, tmp_path / "two", quiet=True)


def test_training_in_a_thread_needs_no_signals(store, tmp_path):
    results = []
    recipe = small_recipe(train={"max_steps": 1})
    thread = threading.Thread(
        target=lambda: results.append(train(recipe, store, tmp_path / "run", quiet=True))
    )
    thread.start()
    thread.join(60)
    assert results[0].status == "finished"
