"""The process of one instance: `python -m slipstream.serving.http.instance_process SETTINGS`.

What outlives the process lies in the shelf directory (shared memory): the prefixes of the host
tier, one file per model version, and the measured cost model. So an instance that was killed is
back quickly and warm. Touch this when something else should outlive the process.
"""

import sys
from functools import partial
from pathlib import Path

from slipstream.bundle import DESCRIPTION
from slipstream.errors import SlipstreamError
from slipstream.files import read_json, write_json
from slipstream.models.model_config import ModelConfig
from slipstream.serving.http.instance_app import InstanceSettings, read_settings, serve_instance
from slipstream.serving.http.process import CANNOT_START
from slipstream.serving.instance.cost_model import CostModel
from slipstream.serving.instance.instance import Instance
from slipstream.serving.instance.instance_config import InstanceConfig


def open_instance(settings: InstanceSettings, current: Instance | None = None) -> Instance:
    """Open the bundle of the settings; returns `current` where its version is still the same."""
    directory = Path(settings.bundle)
    description = read_json(directory / DESCRIPTION)
    version = str(description["version"])
    if current is not None and current.version == version:
        return current
    config = InstanceConfig(**settings.model, host_path=_host_path(settings, version, current))
    cost = _read_cost(settings, version)
    model = ModelConfig.model_validate(description["recipe"]["model"])
    if current is not None and model == current.engine.config:
        # A model of the same size costs the same; to measure now would disturb live requests.
        cost = current.cost
    instance = Instance(directory, config, cost)
    _write_cost(settings, instance)
    return instance


def _host_path(settings: InstanceSettings, version: str, current: Instance | None) -> Path | None:
    """Return the file of this version's host tier; the first opening deletes other versions'."""
    if settings.shelf is None:
        return None
    shelf = Path(settings.shelf)
    path = shelf / f"{settings.name}-{version[:16]}.shelf"
    if current is None:
        for other in shelf.glob(f"{settings.name}-*.shelf"):
            if other != path:
                other.unlink(missing_ok=True)
    return path


def _read_cost(settings: InstanceSettings, version: str) -> CostModel | None:
    """Return what an earlier process of this instance measured for this version, if it did."""
    path = _cost_path(settings)
    if path is None or not path.exists():
        return None
    known = read_json(path)
    if known["version"] != version or "measured" not in known:
        return None
    return CostModel.of(known["measured"])


def _write_cost(settings: InstanceSettings, instance: Instance) -> None:
    path = _cost_path(settings)
    if path is not None:
        write_json(path, {"version": instance.version, "measured": instance.cost.measured()})


def _cost_path(settings: InstanceSettings) -> Path | None:
    return None if settings.shelf is None else Path(settings.shelf) / f"{settings.name}-cost.json"


def main(argument: str) -> None:
    """Serve until a signal ends the process; a bundle that cannot be opened is one sentence."""
    settings = read_settings(argument)
    try:
        serve_instance(settings, partial(open_instance, settings))
    except SlipstreamError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(CANNOT_START)


if __name__ == "__main__":
    main(sys.argv[1])
