"""What every test begins with."""

import os
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
# Processes that tests start find the sources, the benchmarks and the tests as this one does.
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """One torch thread, whatever ran before.

    Workers share the cores, and products of several threads may round differently.
    """
    torch.set_num_threads(1)
