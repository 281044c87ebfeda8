"""The process of one instance: `python -m slipstream.serving.http.instance_process SETTINGS` opens
a bundle and serves it.

What should outlive the process lies in the shelf directory (shared memory): the prefixes of the
host tier, one file per model version, and the cost model, so that an instance that was killed is
back quickly and warm.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.bundle import DESCRIPTION, read_bundle
from slipstream.errors import SlipstreamError
from slipstream.files import read_json, write_json
from slipstream.models.model_config import ModelConfig
from slipstream.serving.engine.items import Behaviours
from slipstream.serving.http.instance_app import InstanceSettings, read_settings, serve_model
from slipstream.serving.instance.cost_model import CostModel
from slipstream.serving.instance.instance import Instance, InstanceConfig


class BundleModel(Instance):
    """An instance of the relay race, as the service wants to see it."""

    @property
    def max_len(self) -> int:
        return self.engine.max_len

    @property
    def tasks(self) -> tuple[str, ...]:
        return self.engine.tasks

    def discard(self) -> None:
        """Close for good: another version has taken over, and nobody may read this one's prefixes."""
        self.close()
        if self.config.host_path is not None:
            Path(self.config.host_path).unlink(missing_ok=True)


class Opener:
    """Opens a bundle's directory, again whenever its content has changed."""

    def __init__(self, settings: InstanceSettings) -> None:
        self._bundle, self._name, self._settings = (
            Path(settings.bundle),
            settings.name,
            settings.model,
        )
        self._shelf = None if settings.shelf is None else Path(settings.shelf)

    def __call__(self, current: BundleModel | None) -> BundleModel:
        """The model in the directory now; `current` itself when nothing has changed."""
        description = read_json(self._bundle / DESCRIPTION)
        version = str(description["version"])
        if current is not None and current.version == version:
            return current
        config = InstanceConfig(**self._settings, host_path=self._host_path(version, current))
        cost = self._known_cost(version)
        if (
            current is not None
            and ModelConfig.model_validate(description["recipe"]["model"]) == current.engine.config
        ):
            # a model of the same size costs the same; measuring beside live requests would only
            # disturb both
            cost = current.cost
        model = BundleModel(self._bundle, config, cost)
        if not model.engine.items.numeric:
            model.close()
            raise SlipstreamError(
                f"the items of bundle {self._bundle} are named by text, but requests carry whole "
                "numbers; prepare such ids"
            )
        self._remember_cost(model)
        return model

    def _host_path(self, version: str, current: BundleModel | None) -> Path | None:
        if self._shelf is None:
            return None
        path = self._shelf / f"{self._name}-{version[:16]}.shelf"
        if current is None:
            for other in self._shelf.glob(f"{self._name}-*.shelf"):
                if other != path:
                    other.unlink(missing_ok=True)  # of a version that is gone
        return path

    def _known_cost(self, version: str) -> CostModel | None:
        """What an earlier process of this instance measured for this version on this machine."""
        path = self._cost_path()
        if path is None or not path.exists():
            return None
        known = read_json(path)
        if known["version"] != version or "measured" not in known:
            return None
        return CostModel.of(known["measured"])

    def _remember_cost(self, model: BundleModel) -> None:
        path = self._cost_path()
        if path is not None:
            write_json(path, {"version": model.version, "measured": model.cost.measured()})

    def _cost_path(self) -> Path | None:
        return None if self._shelf is None else self._shelf / f"{self._name}-cost.json"


def action_columns(directory: Path) -> tuple[str, ...]:
    """The actions a bundle's tasks read of every behaviour: what the history store keeps."""
    recipe = read_bundle(directory).description["recipe"]
    tasks = recipe.get("tasks") or {} if recipe["task"] == "ranking" else {}
    return tuple(sorted({str(task["column"]) for task in tasks.values()}))


def make_behaviours(
    items: np.ndarray, timestamps: np.ndarray, actions: dict[str, np.ndarray], features: Any
) -> Behaviours:
    return Behaviours(items, timestamps, actions, dict(features))


def known_items(model: Any, items: np.ndarray) -> np.ndarray:
    """Which of these ids the model's catalogue holds."""
    ids = model.engine.items.ids_N
    return ids[np.minimum(np.searchsorted(ids, items), ids.size - 1)] == items


def main(argument: str) -> None:
    """Serve until told to stop; a bundle that cannot be opened is one sentence."""
    settings = read_settings(argument)
    try:
        serve_model(
            settings,
            Opener(settings),
            action_columns(Path(settings.bundle)),
            make_behaviours,
            known_items,
        )
    except SlipstreamError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main(sys.argv[1])
