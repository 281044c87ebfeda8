"""A process killed with SIGKILL at any moment leaves the table as of its last flush."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.support import disk_table_victim as victim


def run_and_kill(kind: str, directory: Path, begin: int, delay: float) -> int:
    """Train from step `begin` in a process, and kill it `delay` seconds after its first flush.

    Returns the last step that it reported as flushed.
    """
    command = [sys.executable, victim.__file__, kind, str(directory), str(begin)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert process.stdout is not None
    reported = int(process.stdout.readline())
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    rest = process.stdout.read().split("\n")
    assert process.wait(timeout=300) == -signal.SIGKILL
    return max([reported, *(int(line) for line in rest[:-1] if line)])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["disk", "hashed"])
@pytest.mark.parametrize("kills", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_killed_at_random_moments_a_table_opens_at_its_last_flush(tmp_path, kind, kills):
    chance, begin, everything = random.Random(f"moments of {kind}"), 0, torch.arange(victim.ROWS)
    twin, done = victim.make(kind, None), 0
    for _ in range(kills):
        reported = run_and_kill(kind, tmp_path, begin, chance.uniform(0.0, 0.2))
        table = victim.make(kind, tmp_path)
        found = table.read(everything)
        table.close()
        while done < reported:
            victim.step(twin, done)
            done += 1
        expected = twin.read(everything)
        if not torch.equal(found.weights_UD, expected.weights_UD):
            # The next flush may be complete although it was not reported.
            for _ in range(victim.FLUSH_EVERY):
                victim.step(twin, done)
                done += 1
            expected = twin.read(everything)
        assert torch.equal(found.weights_UD, expected.weights_UD)
        assert all(torch.equal(found.state[name], expected.state[name]) for name in expected.state)
        begin = done
