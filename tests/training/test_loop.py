"""The loop between steps: its length, evaluations, early stopping, and what it maximises."""

import json
import math

import pytest
import torch

from slipstream.data.sampler import TrainingSampler
from slipstream.errors import SlipstreamError
from slipstream.pipeline.work import StepResult
from slipstream.training import checkpoint
from slipstream.training.loop import figure_of_merit, train_step
from slipstream.training.optimizers import make_adamw
from slipstream.training.recommender import Recommender
from slipstream.training.run import open_run, train
from slipstream.training.telemetry import read_metrics
from tests.support.training_fixtures import (
    growing,
    logged_losses,
    loss_of,
    same_tensors,
    saved_tensors,
    small_recipe,
    small_store,
)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("data") / "store")


@pytest.mark.parametrize("max_steps", [1, 2, 5])
def test_max_steps_trains_exactly_so_many(store, tmp_path, max_steps):
    recipe = small_recipe(train={"max_steps": max_steps, "epochs": 100, "log_every": 1})
    result = train(recipe, store, tmp_path / "run", quiet=True)
    assert (result.status, result.step) == ("finished", max_steps)
    assert [step for step, _ in logged_losses(tmp_path / "run")] == list(range(1, max_steps + 1))
    state = checkpoint.read_state(checkpoint.latest(tmp_path / "run" / "checkpoints"))
    optimizer_steps = [
        int(v)
        for k, v in saved_tensors(tmp_path / "run").items()
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
    best, last = saved_tensors(tmp_path / "run", checkpoint.BEST), saved_tensors(tmp_path / "run")
    _, _, recommender = open_run(tmp_path / "run", store)
    assert torch.equal(recommender.tables["item"].weights_ND, best["tables/item/weights"])
    assert not torch.equal(best["tables/item/weights"], last["tables/item/weights"])
    _, _, newest = open_run(tmp_path / "run", which="last")
    assert torch.equal(newest.tables["item"].weights_ND, last["tables/item/weights"])
    again = train(recipe, store, tmp_path / "run", evaluate=growing([9.0]), quiet=True)
    assert (again.status, again.step) == ("stopped early", result.step)


def test_a_metric_that_is_no_number_is_never_the_best(store, tmp_path):
    figures = iter([math.nan, 0.1, math.nan, 0.3])
    result = train(
        small_recipe(train={"epochs": 4, "evaluate_every": 1}),
        store,
        tmp_path / "run",
        evaluate=lambda *_: {"HR@10": next(figures), "NDCG@10": 0.0},
        quiet=True,
    )
    assert result.metrics["HR@10"] == 0.3
    assert result.best_step == result.step


def test_a_loss_that_is_no_number_stops_the_run(store, tmp_path):
    recipe = small_recipe(
        tables={"optimizer": "rowwise_adagrad", "lr": 1e38},
        loss={"normalize": False},
        train={"max_steps": 9, "epochs": 50},
    )
    with pytest.raises(SlipstreamError, match="lower optimizer"):
        train(recipe, store, tmp_path / "run", quiet=True)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"


@pytest.mark.parametrize(
    ("changes", "metrics", "expected"),
    [
        ({}, {"HR@10": 0.25, "NDCG@10": 0.5, "MRR@10": 9.0}, 0.75),
        ({"train": {"metric": "MRR@10 + HR@10"}}, {"HR@10": 0.25, "MRR@10": 0.5}, 0.75),
        (
            {
                "task": "ranking",
                "tasks": {"click": {"column": "click"}, "like": {"column": "like"}},
                "loss": {"kind": "bce"},
            },
            {"AUC/click": 0.5, "AUC/like": 0.75, "GAUC/click": 0.9, "AUC": 0.625},
            1.875,
        ),
    ],
)
def test_early_stopping_maximises_the_recipes_metric(changes, metrics, expected):
    assert figure_of_merit(small_recipe(**changes), metrics) == pytest.approx(expected)


def test_a_step_of_the_plain_loop_is_a_step_result(store):
    recipe = small_recipe()
    ours = Recommender.build(recipe, store)
    sampler = TrainingSampler(store, recipe.sampler, seed=1, split=recipe.split)
    batch = sampler.next_batch()
    expected, count = float(loss_of(ours, batch, 0).detach()), ours.plan_step(batch, 0).count
    optimizer = make_adamw(ours.model, recipe.optimizer)
    result = train_step(ours, optimizer, batch, 0, 10, stop=True)
    assert isinstance(result, StepResult)
    assert (result.step, result.batch, result.count, result.stop) == (0, batch, count, True)
    assert result.loss_sum == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["synchronous", "nested"])
def test_evaluation_within_an_epoch_is_exact_under_resume(store, tmp_path, schedule):
    changes = {"schedule": schedule, "evaluate_every": "3 steps", "epochs": 50, "log_every": 1}
    whole, short = (
        small_recipe(train={**changes, "max_steps": steps, "checkpoint_every": 2})
        for steps in (11, 4)
    )
    train(whole, store, tmp_path / "whole", quiet=True)
    train(short, store, tmp_path / "cut", quiet=True)
    train(whole, store, tmp_path / "cut", quiet=True)
    plain = small_recipe(train={**changes, "schedule": "synchronous", "max_steps": 11})
    train(plain, store, tmp_path / "plain", quiet=True)
    found, expected = evaluations(tmp_path / "whole"), evaluations(tmp_path / "plain")
    assert [step for step, _ in found] == [3, 6, 9, 11]  # and the last step, as ever
    cut = evaluations(tmp_path / "cut")
    assert [step for step, _ in cut] == [3, 4, 6, 9, 11]  # its first part ended at step 4
    assert [each for each in cut if each[0] != 4] == found
    assert logged_losses(tmp_path / "cut") == logged_losses(tmp_path / "whole")
    assert same_tensors(saved_tensors(tmp_path / "cut"), saved_tensors(tmp_path / "whole"))
    for (_, ours), (_, theirs) in zip(found, expected, strict=True):
        assert ours["HR@10"] == pytest.approx(theirs["HR@10"], abs=1e-6)


def test_patience_counts_evaluations_within_an_epoch(store, tmp_path):
    train_options = {"epochs": 50, "evaluate_every": "1 steps", "patience": 2}
    result = train(
        small_recipe(train=train_options),
        store,
        tmp_path / "run",
        evaluate=growing([0.1, 0.3, 0.2, 0.25]),
        quiet=True,
    )
    assert (result.status, result.step, result.best_step) == ("stopped early", 4, 2)


def evaluations(run):
    lines = read_metrics(run / "metrics.jsonl")
    return [(line["step"], line["validation"]) for line in lines if "validation" in line]
