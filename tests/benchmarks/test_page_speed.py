"""The benchmark of the page runs through the server and the browser, and makes its claims."""

import json

import pytest

from benchmarks import page_speed
from tests.support.browser import needs_browser


@pytest.mark.slow
@needs_browser
def test_the_quick_benchmark_runs(tmp_path):
    page_speed.run(quick=True, json_path=tmp_path / "page_speed.json")
    written = json.loads((tmp_path / "page_speed.json").read_text())
    assert {row["variant"] for row in written["rows"]} == {
        "first paint",
        "interaction",
        "explanation",
    }
    assert all(value > 0 for value in written["claims"].values())
