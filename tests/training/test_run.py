"""A run directory: repeatable, resumable, exact in length, and closed to strangers."""

import json
import os
import resource
import signal
import threading

import pytest
import torch
import yaml
from safetensors.torch import load_file

from slipstream.errors import SlipstreamError
from slipstream.training import checkpoint
from slipstream.training.recipe import Recipe
from slipstream.training.run import open_run, sole_user, train
from slipstream.training.telemetry import read_metrics
from tests.support.training_fixtures import small_recipe, small_store


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("data") / "store")


def tensors(run_dir, kind=checkpoint.LAST):
    return load_file(checkpoint.latest(run_dir / "checkpoints", kind) / checkpoint.TENSORS)


def same(one, two):
    return one.keys() == two.keys() and all(
        torch.equal(value, two[name]) for name, value in one.items()
    )


def losses(run_dir):
    return [
        (record["step"], record["loss"])
        for record in read_metrics(run_dir / "metrics.jsonl")
        if "loss" in record
    ]


def growing(figures):
    """An evaluation that gives these figures one after the other, then falls."""
    values = iter(figures)
    return lambda recommender, store, recipe, which: {"HR@10": next(values, 0.0), "NDCG@10": 0.0}


def test_same_seed_twice_is_identical_and_another_seed_is_not(store, tmp_path):
    runs = [tmp_path / name for name in ("one", "two", "three")]
    for run_dir, seed in zip(runs, (1, 1, 2), strict=True):
        assert train(small_recipe(seed=seed), store, run_dir, quiet=True).status == "finished"
    assert same(tensors(runs[0]), tensors(runs[1])) and losses(runs[0]) == losses(runs[1])
    assert not same(tensors(runs[0]), tensors(runs[2]))


@pytest.mark.parametrize("max_steps", [1, 2, 5])
def test_max_steps_trains_exactly_so_many(store, tmp_path, max_steps):
    recipe = small_recipe(train={"max_steps": max_steps, "epochs": 100, "log_every": 1})
    result = train(recipe, store, tmp_path / "run", quiet=True)
    assert (result.status, result.step) == ("finished", max_steps)
    assert [step for step, _ in losses(tmp_path / "run")] == list(range(1, max_steps + 1))
    state = checkpoint.read_state(checkpoint.latest(tmp_path / "run" / "checkpoints"))
    optimizer_steps = [
        int(v)
        for k, v in tensors(tmp_path / "run").items()
        if k.startswith("optimizer/") and k.endswith("/step")
    ]
    assert state["step"] == max_steps and set(optimizer_steps) == {max_steps}


@pytest.mark.parametrize(
    "sampler",
    [{"batch_size": 4}, {"batch_size": None, "token_budget": 20, "stochastic_length": 1.4}],
)
def test_epochs_are_whole_passes(store, tmp_path, sampler):
    seen = []
    recipe = small_recipe(sampler=sampler, train={"epochs": 3, "evaluate_every": 1})

    def evaluate(recommender, store, recipe, which):
        seen.append(which)
        return {"HR@10": 0.1, "NDCG@10": 0.1}

    result = train(recipe, store, tmp_path / "run", evaluate=evaluate, quiet=True)
    assert result.epoch == 3 and seen == ["validation"] * 3


RANKING = {
    "task": "ranking",
    "tasks": {"click": {"column": "click"}},
    "loss": {"kind": "bce"},
    "user_features": ["age"],
}


@pytest.mark.parametrize(
    "changes", [{}, {"model": {"kind": "fuxi"}, "tables": {"optimizer": "adamw"}}, RANKING]
)
def test_a_lengthened_run_ends_where_the_long_run_ends(store, tmp_path, changes):
    short, long = (
        small_recipe(**changes, train={"max_steps": steps, "epochs": 50}) for steps in (3, 9)
    )
    train(long, store, tmp_path / "at once", quiet=True)
    train(short, store, tmp_path / "in two", quiet=True)
    assert train(long, store, tmp_path / "in two", quiet=True).step == 9
    assert same(tensors(tmp_path / "at once"), tensors(tmp_path / "in two"))
    assert losses(tmp_path / "at once") == losses(tmp_path / "in two")


def test_only_the_last_checkpoints_are_kept(store, tmp_path):
    recipe = small_recipe(
        train={"max_steps": 7, "epochs": 50, "checkpoint_every": 2, "keep_last": 2}
    )
    train(recipe, store, tmp_path / "run", quiet=True)
    kept = [path.name for path in checkpoint.list_checkpoints(tmp_path / "run" / "checkpoints")]
    assert kept == ["step-00000006", "step-00000007"]


def test_early_stopping_keeps_the_best_weights(store, tmp_path):
    recipe = small_recipe(train={"epochs": 50, "evaluate_every": 1, "patience": 2})
    result = train(
        recipe, store, tmp_path / "run", evaluate=growing([0.1, 0.3, 0.2, 0.25]), quiet=True
    )
    per_epoch = result.step // 4
    assert (result.status, result.epoch, result.best_step) == ("stopped early", 4, 2 * per_epoch)
    assert result.metrics == {"HR@10": 0.3, "NDCG@10": 0.0}
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run["status"] == "stopped early" and run["metrics"]["HR@10"] == 0.3
    best, last = tensors(tmp_path / "run", checkpoint.BEST), tensors(tmp_path / "run")
    _, _, recommender = open_run(tmp_path / "run", store)
    assert torch.equal(recommender.tables["item"].weights_ND, best["tables/item/weights"])
    assert not torch.equal(best["tables/item/weights"], last["tables/item/weights"])
    _, _, newest = open_run(tmp_path / "run", which="last")
    assert torch.equal(newest.tables["item"].weights_ND, last["tables/item/weights"])
    again = train(recipe, store, tmp_path / "run", evaluate=growing([9.0]), quiet=True)
    assert (again.status, again.step) == ("stopped early", result.step)


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
    assert same(tensors(tmp_path / "whole"), tensors(tmp_path / "cut")) and losses(
        tmp_path / "whole"
    ) == losses(tmp_path / "cut")


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
        pytest.raises(SlipstreamError, match="another process is training"),
    ):
        train(small_recipe(), store, tmp_path / "run", quiet=True)
    (tmp_path / "run" / "run.json").unlink()
    with pytest.raises(SlipstreamError, match="whose they are is not known"):
        train(small_recipe(), store, tmp_path / "run", quiet=True)
    with pytest.raises(SlipstreamError, match="does not exist"):
        open_run(tmp_path / "nowhere", store)


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
    bigger = small_store(tmp_path / "bigger", items=16)
    with pytest.raises(SlipstreamError, match="do not fit"):
        checkpoint.load_weights(newest, Recommender.build(small_recipe(), bigger))
    (newest / checkpoint.TENSORS).write_bytes(b"torn")
    with pytest.raises(SlipstreamError, match="not a readable checkpoint"):
        checkpoint.load_weights(newest, Recommender.build(small_recipe(), store))


def test_a_full_disk_leaves_the_old_checkpoint_loadable(store, tmp_path):
    train(small_recipe(train={"max_steps": 3}), store, tmp_path / "run", quiet=True)
    before = tensors(tmp_path / "run")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (checkpoint.latest(tmp_path / "run" / "checkpoints") / checkpoint.TENSORS).stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, limits[1]))
    try:
        with pytest.raises(SlipstreamError, match="could not write"):
            train(small_recipe(train={"max_steps": 4}), store, tmp_path / "run", quiet=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert same(before, tensors(tmp_path / "run"))
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"
    assert (
        train(small_recipe(train={"max_steps": 4}), store, tmp_path / "run", quiet=True).step == 4
    )


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


def test_a_loss_that_is_no_number_stops_the_run(store, tmp_path):
    recipe = small_recipe(
        tables={"optimizer": "rowwise_adagrad", "lr": 1e38},
        loss={"normalize": False},
        train={"max_steps": 9, "epochs": 50},
    )
    with pytest.raises(SlipstreamError, match="lower optimizer"):
        train(recipe, store, tmp_path / "run", quiet=True)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"
