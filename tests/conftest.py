"""What every test begins with."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """One torch thread, whatever ran before: workers share the cores, and products of several threads may round differently."""
    torch.set_num_threads(1)
