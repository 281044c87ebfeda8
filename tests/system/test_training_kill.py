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
@pytest.mark.parametrize(("mode", "seed"), [("times", 1), ("writes", 2)])
def test_killed_and_resumed_equals_undisturbed(tmp_path, mode, seed):
    paths = os.environ["PYTHONPATH"]
    command = [sys.executable, str(SUPPORT / "kill_and_resume.py"), str(tmp_path), str(seed), mode]
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
    assert found["last_status"] == 0 and found["steps"] == 24, found
    assert found["same_tensors"] and found["same_metrics"] and found["same_state"], found
    assert found["left_over"] == []
