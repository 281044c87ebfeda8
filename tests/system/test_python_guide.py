"""Every block of the Python guide runs, in its order, on a small shop's log.

Left out, and counted: the download, and the client, which needs a running server.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.shop_log import write_shop

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "python.md"
LEFT_OUT = ('ss.prepare("ml-1m")', "with Client(")


def blocks() -> list[str]:
    """The indented blocks of the guide, each as a piece of a program."""
    found, lines = [], []
    for line in [*GUIDE.read_text(encoding="utf-8").splitlines(), "."]:
        if line.startswith("    ") or (not line.strip() and lines):
            lines.append(line[4:])
        elif lines:
            found.append("\n".join(lines).rstrip())
            lines = []
    return found


def test_the_guide_has_blocks_and_few_are_left_out():
    left_out = [block for block in blocks() if any(words in block for words in LEFT_OUT)]
    assert len(blocks()) >= 12 and len(left_out) == 2


@pytest.mark.slow
def test_the_blocks_of_the_guide_run_in_their_order(tmp_path):
    write_shop(tmp_path, customers=60)
    program = [block for block in blocks() if not any(words in block for words in LEFT_OUT)]
    (tmp_path / "guide.py").write_text("\n\n".join(program), encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, "guide.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    for words in ("60 users", "popularity HR@10", "c/0042", "title"):
        assert words in ended.stdout
    assert re.search(r"HR@10 +0\.\d{4}", ended.stdout)
