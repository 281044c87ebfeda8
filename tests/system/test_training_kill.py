"""A run killed by SIGKILL at any moment and resumed ends bit for bit like an undisturbed one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[1] / "support"
SECONDS = 900  # for a busy machine; time is not what is tested here


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize(
    ("mode", "tables", "seed"),
    [
        ("times", "whole", 1),
        pytest.param("writes", "whole", 2, marks=pytest.mark.slow),
        pytest.param("writes", "memory", 3, marks=pytest.mark.slow),
        ("writes", "disk", 4),
        pytest.param("writes", "hashed", 5, marks=pytest.mark.slow),
    ],
)
def test_killed_and_resumed_equals_undisturbed(tmp_path, mode, tables, seed):
    paths = os.environ["PYTHONPATH"]
    script = str(SUPPORT / "kill_and_resume.py")
    command = [sys.executable, script, str(tmp_path), str(seed), mode, tables]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    # The run was really cut, at several places.
    assert found["kills"] >= 3 and len(set(found["standing"])) >= 2, found
    steps = 24 if tables == "whole" else 96
    assert found["last_status"] == 0 and found["steps"] == steps, found
    assert found["same_tensors"] and found["same_metrics"] and found["same_state"], found
    assert found["left_over"] == []
