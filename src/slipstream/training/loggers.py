"""The loggers a recipe can name (`train.loggers`): Weights & Biases and MLflow, as callbacks.

Each sends the recipe, what is logged while training and every validation. Where to send them is the
business of their own environment variables (WANDB_MODE, WANDB_PROJECT, MLFLOW_TRACKING_URI,
MLFLOW_EXPERIMENT_NAME). A resumed run goes on in the same remote run: its id is in loggers.json of
the run's directory. Packages are imported only when named. Touch this to send something more.
"""

import importlib.util
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.config import flatten
from slipstream.errors import SlipstreamError
from slipstream.files import read_json, write_json
from slipstream.training.callbacks import Callback, TrainingSession

IDS = "loggers.json"
PROJECT = "slipstream"
PARAMETERS_AT_ONCE = 100  # what MLflow takes in one call


def make_loggers(names: Sequence[str]) -> tuple[Callback, ...]:
    """Make the loggers a recipe names; a package that is missing is refused."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise SlipstreamError(
                f"train.loggers names {name}, which is not installed; run: pip install "
                f"'slipstream[{name}]'"
            )
    return tuple(WandbLogger() if name == "wandb" else MlflowLogger() for name in names)


def numbers_of(group: str, figures: dict[str, Any]) -> dict[str, float]:
    """Return what of some figures is a number, named as TensorBoard's: `validation/HR@10`."""
    return {
        f"{group}/{name}": float(value)
        for name, value in figures.items()
        if isinstance(value, int | float)
    }


def recall_id(directory: Path, logger: str) -> str | None:
    """Return the id of a run's remote run; None before it has one."""
    ids = read_json(directory / IDS) if (directory / IDS).exists() else {}
    found = ids.get(logger)
    return None if found is None else str(found)


def remember_id(directory: Path, logger: str, run_id: str) -> None:
    """Keep the id of a run's remote run for the next session."""
    ids = read_json(directory / IDS) if (directory / IDS).exists() else {}
    write_json(directory / IDS, {**ids, logger: run_id})


class WandbLogger(Callback):
    """Sends a run to Weights & Biases; WANDB_MODE=offline keeps it in the run's directory."""

    def __init__(self) -> None:
        self._run: Any = None

    def on_start(self, session: TrainingSession) -> None:
        import wandb

        directory = session.directory
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=session.recipe.name,
            id=recall_id(directory, "wandb"),
            resume="allow",
            dir=str(directory),
            config=session.recipe.model_dump(mode="json"),
        )
        remember_id(directory, "wandb", self._run.id)

    def on_log(self, session: TrainingSession, figures: dict[str, Any]) -> None:
        self._run.log(numbers_of("train", figures), step=session.step)

    def on_evaluation(
        self, session: TrainingSession, figures: dict[str, float], is_best: bool
    ) -> None:
        self._run.log(numbers_of("validation", figures), step=session.step)
        if is_best:
            self._run.summary.update({"best_step": session.step, **numbers_of("best", figures)})

    def on_end(self, session: TrainingSession, status: str) -> None:
        if self._run is not None:
            self._run.summary["status"] = status
            self._run.finish(exit_code=int(status == "failed"))


class MlflowLogger(Callback):
    """Sends a run to MLflow: to MLFLOW_TRACKING_URI, else where MLflow does by default.

    MLflow allows no @ in a name, so HR@10 is called HR_at_10 there.
    """

    def __init__(self) -> None:
        self._client: Any = None
        self._run_id = ""

    def on_start(self, session: TrainingSession) -> None:
        import mlflow

        client = self._client = mlflow.MlflowClient()
        known = recall_id(session.directory, "mlflow")
        if known is not None:
            self._run_id = known
            client.update_run(known, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = client.get_experiment_by_name(name)
        experiment = found.experiment_id if found is not None else client.create_experiment(name)
        self._run_id = client.create_run(experiment, run_name=session.recipe.name).info.run_id
        remember_id(session.directory, "mlflow", self._run_id)
        parameters = [
            mlflow.entities.Param(key, json.dumps(value))
            for key, value in flatten(session.recipe.model_dump(mode="json")).items()
        ]
        for begin in range(0, len(parameters), PARAMETERS_AT_ONCE):
            part = parameters[begin : begin + PARAMETERS_AT_ONCE]
            client.log_batch(self._run_id, params=part)

    def on_log(self, session: TrainingSession, figures: dict[str, Any]) -> None:
        self._send(session, numbers_of("train", figures))

    def on_evaluation(
        self, session: TrainingSession, figures: dict[str, float], is_best: bool
    ) -> None:
        self._send(session, numbers_of("validation", figures))
        if is_best:
            self._client.set_tag(self._run_id, "best_step", str(session.step))

    def on_end(self, session: TrainingSession, status: str) -> None:
        if self._run_id:
            self._client.set_tag(self._run_id, "status", status)
            ends = {"failed": "FAILED", "interrupted": "KILLED"}
            self._client.set_terminated(self._run_id, ends.get(status, "FINISHED"))

    def _send(self, session: TrainingSession, figures: dict[str, float]) -> None:
        import mlflow

        now = int(time.time() * 1000)
        metrics = [
            mlflow.entities.Metric(name.replace("@", "_at_"), value, now, session.step)
            for name, value in figures.items()
        ]
        self._client.log_batch(self._run_id, metrics=metrics)
