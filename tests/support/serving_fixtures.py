"""Deployments for the serving tests: supervised stand-ins or real instances behind a real router,
on free ports, ended for sure.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.chaos.course import supervised
from benchmarks.serving.bundle import random_bundle
from slipstream.serving.supervisor import DeploymentConfig, Supervisor
from tests.support.serving_stand_in import write_standin_bundle

TESTS = Path(__file__).parent
KEY = "a test key of some length"
SMALL_MODEL = {
    "kind": "hstu",
    "dim": 16,
    "blocks": 2,
    "heads": 2,
    "max_len": 512,
    "time_buckets": 32,
}
STAND_IN = (sys.executable, str(TESTS / "serving_stand_in.py"))


def standin_plan(
    tmp_path: Path, *, instances: int = 2, key: str = KEY, **changes: Any
) -> DeploymentConfig:
    """Stand-ins that share a bundle (a file with a version) and a history store."""
    bundle = tmp_path / "bundle"
    write_standin_bundle(bundle, "v1")
    model = changes.pop("model", {})
    settings = {
        "bundle": str(bundle),
        "history": changes.pop("history", f"sqlite:{tmp_path / 'history.db'}"),
        "model": model,
        "allow_kill": changes.pop("allow_kill", False),
    }
    os.environ.setdefault("PYTHONPATH", os.environ["PYTHONPATH"])
    changes = {"instance_command": STAND_IN, **changes}
    return DeploymentConfig(
        instances, settings, api_keys=(f"{key} role=admin",) if key else (), **changes
    )


@contextlib.contextmanager
def deployment(tmp_path: Path, **changes: Any) -> Iterator[Supervisor]:
    """Running stand-ins behind a router."""
    with supervised(standin_plan(tmp_path, **changes), lambda _sentence: None) as supervisor:
        yield supervisor


@contextlib.contextmanager
def real_deployment(tmp_path: Path, *, instances: int = 1) -> Iterator[Supervisor]:
    """A small bundle of random weights, items 0 to 999, served by real engines behind a router."""
    bundle = tmp_path / "bundle"
    random_bundle(bundle, SMALL_MODEL, num_items=1_000, first_id=0)
    model = {"device_bytes": 8 << 20, "host_bytes": 8 << 20, "calibrate_seconds": 0.05}
    settings = {
        "bundle": str(bundle),
        "history": f"sqlite:{tmp_path / 'history.db'}",
        "model": model,
    }
    os.environ.setdefault("PYTHONPATH", os.environ["PYTHONPATH"])
    with supervised(
        DeploymentConfig(instances, settings, api_keys=(f"{KEY} role=admin",), spare=False),
        lambda _sentence: None,
    ) as supervisor:
        yield supervisor


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    """Wait for a condition, or fail loudly."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
