"""Python code in a process of its own, for tests whose environment must be set before imports."""

import os
import subprocess
import sys


def run_python(code: str, *, timeout: float = 280, **environment: str) -> str:
    """Run `code` with these environment variables; returns its output, or fails with its error."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()
