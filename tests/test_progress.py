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


def shown_in_notebook(script: str) -> str:
    """Run a script in a process that looks like a notebook's kernel; return its stderr."""
    code = textwrap.dedent(NOTEBOOK) + textwrap.dedent(script)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120)
    assert ended.returncode == 0, ended.stderr.decode()
    return ended.stderr.decode()  # with its carriage returns, which text=True would replace


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
    text = shown_in_notebook("""
        import time
        from slipstream.progress import Ticker

        with Ticker(patience=0.0) as ticker:
            time.sleep(0.3)
            ticker("reading", 1, 4)
    """)
    assert "\rreading  25 %" in text


@pytest.mark.system
def test_training_shows_its_progress_in_a_notebook():
    text = shown_in_notebook("""
        from slipstream.training.telemetry import ProgressLine

        line = ProgressLine(3)
        line.show(2, 1, 4, "loss 5.9", now=True)
        line.close()
        ProgressLine(3, quiet=True).show(1, 1, 4, "never shown", now=True)
    """)
    assert "\repoch 2/3 25 %  loss 5.9" in text
    assert "never" not in text
