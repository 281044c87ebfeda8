"""Progress in a notebook: a line that is written over, and nothing to install for it."""

import io
import subprocess
import sys
import textwrap

import pytest

from slipstream.progress import NotebookLine

NOTEBOOK = """
    import builtins

    class ZMQInteractiveShell:  # what a notebook's kernel is called
        pass

    builtins.get_ipython = ZMQInteractiveShell
"""


def run_in_notebook(script: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a script in a process that looks like a notebook's kernel."""
    code = textwrap.dedent(NOTEBOOK) + textwrap.dedent(script)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, **options
    )


def test_a_line_replaces_the_one_before_it():
    stream = io.StringIO()
    line = NotebookLine(stream)
    line.show("epoch 1/2 50 %", now=True)
    line.show("done", now=True)
    assert stream.getvalue() == "\repoch 1/2 50 %\rdone          "
    line.close()
    assert stream.getvalue().endswith("\r" + " " * 14 + "\r")


def test_updates_are_few():
    stream = io.StringIO()
    line = NotebookLine(stream)
    for number in range(100):
        line.show(str(number))
    assert stream.getvalue().count("\r") < 50


def test_a_line_that_showed_nothing_leaves_nothing():
    stream = io.StringIO()
    NotebookLine(stream).close()
    assert stream.getvalue() == ""


@pytest.mark.system
def test_long_work_shows_its_progress_in_a_notebook():
    ended = run_in_notebook("""
        import time
        from slipstream.progress import Ticker

        with Ticker(patience=0.0) as ticker:
            time.sleep(0.3)
            ticker("reading", 1, 4)
    """)
    assert ended.returncode == 0 and "\rreading  25 %" in ended.stderr


@pytest.mark.system
def test_training_shows_its_progress_in_a_notebook():
    ended = run_in_notebook("""
        from slipstream.training.telemetry import ProgressLine

        line = ProgressLine(3)
        line.show(2, 1, 4, "loss 5.9", now=True)
        line.close()
        ProgressLine(3, quiet=True).show(1, 1, 4, "never shown", now=True)
    """)
    assert ended.returncode == 0 and "\repoch 2/3 25 %  loss 5.9" in ended.stderr
    assert "never" not in ended.stderr
