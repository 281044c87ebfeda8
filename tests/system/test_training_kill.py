"""A run killed by SIGKILL at any moment and resumed ends bit for bit where the undisturbed run
ends.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize(("mode", "seed"), [("times", 1), ("writes", 2)])
def test_killed_and_resumed_equals_undisturbed(tmp_path, mode, seed):
    paths = os.environ["PYTHONPATH"]
    command = [sys.executable, str(HERE / "kill_and_resume.py"), str(tmp_path), str(seed), mode]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["kills"] >= 3 and len(set(found["standing"])) >= 2, (
        found
    )  # the run was really cut, at several places
    assert found["last_status"] == 0 and found["steps"] == 24, found
    assert found["same_tensors"] and found["same_metrics"] and found["same_state"], found
    assert found["left_over"] == []
