"""The shared part of every benchmark: turns, medians, the JSON, and the command group that finds
the benchmarks.
"""

import json
import types

import pytest
import typer
from typer.testing import CliRunner

from slipstream.bench import harness, kernels
from slipstream.cli import bench_commands as command


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


def test_the_command_finds_every_benchmark():
    assert "kernels" in command.benchmarks() and "harness" not in command.benchmarks()
    app = typer.Typer()
    command.register(app)
    shown = CliRunner().invoke(app, ["bench", "--help"])
    assert shown.exit_code == 0 and "kernels" in shown.output and "all" in shown.output


@pytest.mark.parametrize(
    "arguments", [["--json"], ["--json", "--quick"], ["--quick", "--json", "-"]]
)
def test_json_without_a_file_goes_to_standard_output_alone(monkeypatch, arguments):
    module = types.SimpleNamespace(
        __doc__="A demo.",
        run=lambda quick, path: harness.finish("demo", [], {"quick": float(quick)}, path),
    )
    monkeypatch.setattr(command, "benchmarks", lambda: {"demo": module})
    app = typer.Typer()
    command.register(app)
    done = CliRunner().invoke(app, ["bench", "demo", *arguments])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["claims"] == {"quick": float("--quick" in arguments)}


def test_peers_of_the_kernel_benchmark_compute_the_same(monkeypatch):
    problem = kernels.Problem(3, 2, 8)
    kernels.check_agreement(problem)
    monkeypatch.setattr(kernels, "loop", lambda p: lambda: tuple(2 * x for x in p.ours(True)()))
    with pytest.raises(AssertionError, match="something else"):
        kernels.check_agreement(problem)
