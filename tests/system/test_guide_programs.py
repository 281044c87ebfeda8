"""Guides whose Python blocks are one program: each runs as a newcomer would type it.

`docs/guides/adding-a-model.md` trains its small model for a few steps here,
`docs/guides/adding-an-operator.md` compares its back-end with its reference.
"""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.shop_log import write_shop

GUIDES = Path(__file__).resolve().parents[2] / "docs" / "guides"
pytestmark = [pytest.mark.system, pytest.mark.timeout(280)]


def program(page: str) -> str:
    """The Python blocks of a guide, one after the other."""
    text = (GUIDES / page).read_text(encoding="utf-8")
    return "\n\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))


def run(source: str, place: Path) -> str:
    """What a program prints; it must end well."""
    (place / "guide.py").write_text(source, encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, "guide.py"],
        cwd=place,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


def test_the_model_of_the_guide_learns_and_keeps_its_promises(tmp_path: Path):
    write_shop(tmp_path, customers=120)
    told = run(program("adding-a-model.md"), tmp_path)
    first, last = map(float, re.search(r"loss ([\d.]+), then ([\d.]+)", told).groups())  # type: ignore[union-attr]
    assert last < 0.9 * first
    assert "a prefix is found again" in told


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_the_back_end_of_the_guide_equals_its_reference(tmp_path: Path):
    assert "triton equals the reference" in run(program("adding-an-operator.md"), tmp_path)


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_the_proof_of_the_guide_can_fail(tmp_path: Path):
    wrong = program("adding-an-operator.md").replace("total / tl.maximum", "total * tl.maximum")
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        run(wrong, tmp_path)
