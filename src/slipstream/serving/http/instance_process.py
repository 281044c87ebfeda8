"""The process of one instance: `python -m slipstream.serving.http.instance_process -`.

Its settings come from stdin, which the supervisor holds open as long as it lives.

What outlives the process lies in the shelf directory (shared memory): the prefixes of the host
tier, one file per model version, and the measured cost model. So an instance that was killed is
back quickly and warm. Touch this when something else should outlive the process.
"""

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from slipstream.bundle import DESCRIPTION, read_bundle
from slipstream.errors import SlipstreamError
from slipstream.files import read_json, write_json
from slipstream.models.model_config import ModelConfig
from slipstream.serving.bundle_pins import RETRIEVAL
from slipstream.serving.http.instance_app import InstanceSettings, open_versions, serve_instance
from slipstream.serving.http.process import CANNOT_START, read_settings
from slipstream.serving.instance.cost_model import CostModel
from slipstream.serving.instance.instance import Instance
from slipstream.serving.instance.instance_config import InstanceConfig
from slipstream.serving.instance.warm_up import warm_up

WHOLE_BYTES = 2**30  # weights up to this size are checked whole before they take over
log = logging.getLogger("slipstream.serving")


@dataclass(frozen=True)
class BundlePart:
    """One bundle of a deployment; `name` is before the names of its files on the shelf."""

    name: str
    directory: Path
    current: Instance | None  # the instance that serves it now

    @property
    def version(self) -> str:
        return str(read_json(self.directory / DESCRIPTION)["version"])


def open_instance(
    settings: InstanceSettings, directory: Path, current: Instance | None = None
) -> Instance:
    """Open the version in a directory, and that of retrieval; beside another one, warm.

    What takes over from another version was checked whole, unless it is large: users of the other
    one should not be the first to touch a damaged block.
    """
    parts = [BundlePart("", directory, current)]
    if settings.retrieval is not None:
        pinned = directory / RETRIEVAL
        before = None if current is None else current.retrieval
        place = pinned if settings.pinned else Path(settings.retrieval)
        parts.insert(0, BundlePart("retrieval-", place, before))
    if current is None:
        _forget_shelves(settings, [part.version for part in parts])
    else:
        for part in parts:
            read_bundle(part.directory).check_files(WHOLE_BYTES)
    opened: Instance | None = None
    for part in parts:  # the instance of retrieval is handed to that of ranking
        opened = _open_part(settings, part, opened)
    assert opened is not None
    if current is not None:
        try:
            warm_up(opened.engine)
        except BaseException:
            opened.discard()
            raise
    return opened


def _open_part(
    settings: InstanceSettings, part: BundlePart, retrieval: Instance | None
) -> Instance:
    """Open one bundle of a deployment; of two, each has half of the memory."""
    config = InstanceConfig.of(settings.model, host_path=_host_path(settings, part))
    if settings.retrieval is not None:
        half = (config.device_bytes // 2, config.host_bytes // 2)
        config = replace(config, device_bytes=half[0], host_bytes=half[1])
    cost = _read_cost(settings, part)
    model = read_json(part.directory / DESCRIPTION)["recipe"]["model"]
    if part.current is not None and ModelConfig.model_validate(model) == part.current.engine.config:
        # A model of the same size costs the same; to measure now would disturb live requests.
        cost = part.current.cost
    instance = Instance(part.directory, config, cost, retrieval=retrieval)
    _write_cost(settings, part, instance)
    return instance


def _host_path(settings: InstanceSettings, part: BundlePart) -> Path | None:
    """Return the file of a version's host tier: another one than the instance of now uses."""
    if settings.shelf is None:
        return None
    shelf, start = Path(settings.shelf), f"{settings.name}-{part.name}{part.version[:16]}"
    path = shelf / f"{start}.shelf"
    if part.current is not None and part.current.config.host_path == path:
        return shelf / f"{start}-again.shelf"
    return path


def _forget_shelves(settings: InstanceSettings, opened: Sequence[str]) -> None:
    """Delete the host tiers of versions that are not served."""
    if settings.shelf is None:
        return
    served = set(opened)
    if settings.pinned:
        for version in open_versions(settings).read().open_versions:
            served |= set(version.split("+"))
    for tier in Path(settings.shelf).glob(f"{settings.name}-*.shelf"):
        if not any(version[:16] in tier.name for version in served):
            tier.unlink(missing_ok=True)


def _read_cost(settings: InstanceSettings, part: BundlePart) -> CostModel | None:
    """Return what an earlier process of this instance measured for this version, if it did."""
    path = _cost_path(settings, part)
    if path is None or not path.exists():
        return None
    known = read_json(path)
    measured = known.get("measured", {})
    if known["version"] != part.version or "inline_coefficients" not in measured:
        return None  # of another bundle, or by an earlier version
    return CostModel.of(measured)


def _write_cost(settings: InstanceSettings, part: BundlePart, instance: Instance) -> None:
    path = _cost_path(settings, part)
    if path is not None:
        measured = {"version": instance.engine.version, "measured": instance.cost.measured()}
        try:
            write_json(path, measured)
        except OSError as error:  # the next process measures again
            log.warning("the measured costs are not kept: %s", error)


def _cost_path(settings: InstanceSettings, part: BundlePart) -> Path | None:
    if settings.shelf is None:
        return None
    return Path(settings.shelf) / f"{settings.name}-{part.name}cost.json"


def main(argument: str) -> None:
    """Serve until a signal ends the process; a bundle that cannot be opened is one sentence."""
    settings = read_settings(argument, InstanceSettings)
    try:
        serve_instance(settings, partial(open_instance, settings))
    except SlipstreamError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(CANNOT_START)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # everything is closed; torch would take a second to leave in good order


if __name__ == "__main__":
    main(sys.argv[1])
