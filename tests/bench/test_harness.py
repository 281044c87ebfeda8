"""Variants take turns, medians come with their spread, and the JSON has the agreed fields."""

import io
import json
import re
import sys
from types import ModuleType, SimpleNamespace

import pytest
from rich.console import Console

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
    fields = {"bench", "command", "commit", "when", "machine", "threads", "rows", "claims"}
    assert set(written) == fields
    assert (
        written["bench"] == "demo"
        and written["claims"] == {"speed": 2.0}
        and written["rows"] == rows
    )


@pytest.mark.parametrize(
    ("program", "module", "told"),
    [
        ("benchmarks/checkpoint.py", "benchmarks.checkpoint", "python -m benchmarks.checkpoint"),
        ("__main__.py", "benchmarks.pipeline.__main__", "python -m benchmarks.pipeline"),
        ("bin/slipstream", None, "slipstream"),
        ("__main__.py", "slipstream.__main__", "slipstream"),
    ],
)
def test_a_result_names_its_command_without_the_place_it_is_written_to(
    monkeypatch: pytest.MonkeyPatch, program: str, module: str | None, told: str
):
    main = ModuleType("__main__")
    main.__spec__ = None if module is None else SimpleNamespace(name=module)
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(
        sys,
        "argv",
        [program, "--quick", "--json", "out.json", "--recorded", "r.json", "--part", "a"],
    )
    assert harness.command_line() == f"{told} --quick --part a"
    monkeypatch.setattr(sys, "argv", [program, "--json"])
    assert harness.command_line() == told


def test_a_wide_table_is_told_whole_at_80_columns():
    rows = [
        {"variant": f"variant {i}"} | {f"a long heading {j}": 1.5 * i + j for j in range(12)}
        for i in range(3)
    ]
    console = Console(file=io.StringIO(), width=80)
    harness.print_rows(console, rows, "bench demo", "caption")
    text = console.file.getvalue()
    assert "…" not in text and max(len(line) for line in text.splitlines()) <= 80
    assert all(f"a long heading {j} " in text for j in range(12))
    assert len(re.findall("variant 2", text)) > 1 and text.count("caption") == 1


def test_a_table_leaves_out_rows_without_a_value_of_its_columns():
    rows = [{"variant": "speed", "a long heading of speed": 1.0} for _ in range(3)]
    rows += [{"variant": "memory", "a long heading of memory": 2.0}]
    console = Console(file=io.StringIO(), width=40)
    harness.print_rows(console, rows, "bench demo", "caption")
    text = console.file.getvalue()
    assert text.count("│ speed") == 3 and text.count("│ memory") == 1
