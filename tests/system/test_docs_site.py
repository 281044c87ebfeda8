"""The manual becomes a site without a warning."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "docs"))


@pytest.mark.slow
@pytest.mark.skipif(find_spec("mkdocs") is None, reason="mkdocs-material is not installed")
def test_the_site_is_built_strictly(tmp_path: Path):
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        words,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr[-3000:]
    assert (tmp_path / "index.html").is_file() and (tmp_path / "reference" / "api.html").is_file()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[guide](../guides/serving.md#x)", "[guide](../guides/serving.md#x)"),
        ("[raw](../../benchmarks/a.json)", "raw (`benchmarks/a.json`)"),
        ("[benchmarks/a.json](../../benchmarks/a.json)", "benchmarks/a.json"),
    ],
)
def test_links_out_of_the_manual_become_paths(text: str, expected: str):
    from site_links import on_page_markdown

    page = SimpleNamespace(file=SimpleNamespace(src_uri="evidence/tables.md"))
    assert on_page_markdown(text, page) == expected
