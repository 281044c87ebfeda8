"""What every test begins with."""

import os
from pathlib import Path

import hypothesis
import pytest
import torch
from hypothesis.internal.conjecture import providers

ROOT = Path(__file__).parent.parent
# Processes that tests start find the sources, the benchmarks and the tests as this one does.
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
# The same examples every time: a test that fails here fails everywhere.
hypothesis.settings.register_profile("seeded", derandomize=True)
hypothesis.settings.load_profile("seeded")
# Hypothesis also draws constants that it finds in the modules loaded so far, so that a test's
# examples would depend on which tests ran before it. No setting turns this off.
providers._get_local_constants = lambda: providers._local_constants


@pytest.fixture(autouse=True, scope="session")
def own_state(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A state directory of the tests: the user's own is left alone."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """One torch thread, whatever ran before.

    Workers share the cores, and products of several threads may round differently.
    """
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test exactly one of the markers unit, system, slow."""
    for item in items:
        if any(item.get_closest_marker(name) for name in ("system", "slow")):
            continue
        place = item.path.relative_to(ROOT / "tests").parts[0]
        item.add_marker("system" if place in ("system", "benchmarks") else "unit")
