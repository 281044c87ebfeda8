"""Variants take turns, medians come with their spread, and the JSON has the agreed fields."""

import json

import pytest

from slipstream.bench import harness


def test_variants_take_turns_and_warm_up_does_not_count():
    seen = []
    samples = harness.interleave(
        {"a": lambda: seen.append("a"), "b": lambda: seen.append("b")}, repeats=3, warm_up=2
    )
    assert "".join(seen) == "ab" * 5
    assert [len(samples["a"]), len(samples["b"])] == [3, 3]


def test_median_and_spread():
    assert harness.median([3.0, 1.0, 2.0]) == 2.0
    assert harness.spread([1.0]) == 0.0
    assert harness.spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2 / 2 / 3)


def test_the_json_has_the_agreed_fields(tmp_path):
    rows = [
        {"variant": "x", "ms": 1.5, "samples": [1.0, 2.0]},
        {"variant": "y", "mfu": 0.5, "samples": []},
    ]
    returned = harness.finish("demo", rows, {"speed": 2.0}, tmp_path / "out.json")
    written = json.loads((tmp_path / "out.json").read_text())
    assert written == returned
    assert set(written) == {"bench", "when", "machine", "threads", "rows", "claims"}
    assert (
        written["bench"] == "demo"
        and written["claims"] == {"speed": 2.0}
        and written["rows"] == rows
    )
