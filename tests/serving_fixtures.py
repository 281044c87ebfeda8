"""Deployments for the serving tests: supervised stand-ins or real instances behind a real router, on free ports, ended for sure."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slipstream.serving.supervisor import Plan, Supervisor

TESTS = Path(__file__).parent
KEY = "a test key of some length"
STAND_IN = (sys.executable, str(TESTS / "serving_standin.py"))


@contextlib.contextmanager
def deployment(tmp_path: Path, *, instances: int = 2, key: str = KEY, standin: bool = True, **changes: Any) -> Iterator[Supervisor]:
    """A running supervisor in a thread; everything it started has left when the block ends."""
    bundle = tmp_path / "bundle"
    if standin and not bundle.exists():
        bundle.mkdir()
        (bundle / "version").write_text("v1")
    settings = {"bundle": str(bundle), "history": f"sqlite:{tmp_path / 'history.db'}", **changes.pop("instance_settings", {})}
    if standin:
        changes.setdefault("instance_command", STAND_IN)
    os.environ.setdefault("PYTHONPATH", os.pathsep.join(sys.path))
    said: list[str] = []
    plan = Plan(instances, settings, api_keys=(key,) if key else (), **changes)
    supervisor = Supervisor(plan, said.append)
    failure: list[BaseException] = []

    def run() -> None:
        try:
            supervisor.run()
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        wait_until(lambda: bool(failure) or len([s for s in said if "ready" in s]) >= instances + plan.routers, 100)
        if failure:
            raise failure[0]
        supervisor.said = said  # type: ignore[attr-defined]
        yield supervisor
    finally:
        supervisor.stop()
        thread.join(40)
        assert not thread.is_alive(), "the supervisor did not end"


def wait_until(condition: Any, seconds: float) -> None:
    """Wait for a condition, or fail loudly."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
