"""Loggers send a run's recipe and figures elsewhere; a resumed run goes on in the same place."""

import json

import pytest

from slipstream.errors import SlipstreamError
from slipstream.training import loggers
from slipstream.training.recipe import trained_digest
from slipstream.training.run import train
from tests.support.training_fixtures import logged_losses, small_recipe, small_store


def recipe_with(names, steps):
    options = {"max_steps": steps, "epochs": 50, "evaluate_every": "2 steps", "log_every": 1}
    return small_recipe(train={**options, "loggers": names})


def test_a_missing_package_is_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(loggers.importlib.util, "find_spec", lambda name: None)
    expected = r"names wandb, which is not installed; run: pip install 'slipstream\[wandb\]'"
    store = small_store(tmp_path / "store")
    with pytest.raises(SlipstreamError, match=expected):
        train(recipe_with(["wandb"], 2), store, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_loggers_do_not_change_which_run_it_is():
    assert trained_digest(recipe_with(["mlflow"], 2)) == trained_digest(recipe_with([], 2))


def test_numbers_are_named_as_on_tensorboard():
    figures = {"HR@10": 0.5, "users": 3, "note": "text"}
    assert loggers.numbers_of("validation", figures) == {
        "validation/HR@10": 0.5,
        "validation/users": 3.0,
    }


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_the_same_remote_runs(tmp_path, monkeypatch):
    """Weights & Biases offline, MLflow in a folder; both are in the extra `dev`."""
    mlflow = pytest.importorskip("mlflow", reason="mlflow-skinny is not installed")
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    store, run = small_store(tmp_path / "store"), tmp_path / "run"
    for steps in (3, 6):
        train(recipe_with(["wandb", "mlflow"], steps), store, run, quiet=True)
    ids = json.loads((run / "loggers.json").read_text())
    client = mlflow.MlflowClient()
    remote = client.get_run(ids["mlflow"])
    assert remote.info.status == "FINISHED" and remote.data.params["model.dim"] == "8"
    sent = [(one.step, one.value) for one in client.get_metric_history(ids["mlflow"], "train/loss")]
    assert sorted(sent) == logged_losses(run)
    steps = [one.step for one in client.get_metric_history(ids["mlflow"], "validation/HR_at_10")]
    assert sorted(steps) == [2, 3, 4, 6]
    kept = list((run / "wandb").glob(f"offline-run-*-{ids['wandb']}"))
    assert len(kept) >= 1 and all(list(one.glob("*.wandb")) for one in kept)
