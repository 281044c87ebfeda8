"""`slipstream serve` as a process of its own, and commands as a user types them."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slipstream.cli.app import run_command

Slipstream = Callable[..., tuple[int, str]]
LONG = 60.0  # seconds; only ends a test that hangs
KEY = "a key of sixteen characters or more"
ADMIN = "an operator key of the same length"


@pytest.fixture
def slipstream(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Slipstream:
    """Run one command in this process; return its exit code and its output."""

    def run(*words: str, **environment: str) -> tuple[int, str]:
        monkeypatch.setenv("COLUMNS", "120")
        for name in ("SLIPSTREAM_URL", "SLIPSTREAM_API_KEY", "SLIPSTREAM_ADMIN_KEY"):
            monkeypatch.setenv(name, environment.get(name, ""))
        capsys.readouterr()
        code = run_command(list(words))
        output = capsys.readouterr()
        return code, output.out + output.err

    return run


def serve_words(bundle: Path, *options: str) -> list[str]:
    """The command that serves a bundle on a free port."""
    words = [sys.executable, "-u", "-m", "slipstream", "serve", str(bundle), "--port", "0"]
    return [*words, "--deadline-ms", f"{1_000 * LONG:.0f}", *options]


@contextlib.contextmanager
def served(
    bundle: Path, *options: str, before: tuple[str, ...] = ()
) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """Run `slipstream serve`, `before` its first word; give its URL and its process."""
    settings = {**os.environ, "SLIPSTREAM_API_KEY": KEY, "SLIPSTREAM_ADMIN_KEY": ADMIN}
    process = subprocess.Popen(
        [*before, *serve_words(bundle, *options)],
        env=settings,
        stdout=subprocess.PIPE,
        text=True,
        cwd=bundle.parent,
    )
    assert process.stdout is not None
    try:
        text = ""
        while text.count("is ready") < 2:
            line = process.stdout.readline()
            assert line, f"serve ended: {text}"
            text += line
        found = re.search(r"http://[0-9.:]+", text)
        assert found is not None
        assert f"slipstream client health --url {found.group()}" in text
        yield found.group(), process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(LONG)
        finally:
            process.kill()


def figure(metrics: str, name: str) -> float:
    """The sum of a metric over its labels."""
    lines = [line.split() for line in metrics.splitlines()]
    return sum(float(words[-1]) for words in lines if words[0].partition("{")[0] == name)
