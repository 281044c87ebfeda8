"""`slipstream bench` imports one measurement at a time and writes its JSON to the given place."""

import importlib
import json
import sys

import pytest

from slipstream.bench import harness
from slipstream.cli import bench_commands
from slipstream.cli.app import run_command
from slipstream.cli.bench_commands import COMPARISONS, MEASUREMENTS, BenchGroup, measurement_app


def measure(quick, path):
    return harness.finish("demo", [{"variant": "only", "ms": 1.0}], {"quick": float(quick)}, path)


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_every_measurement_can_be_called(name, monkeypatch):
    module = importlib.import_module(f"slipstream.bench.{MEASUREMENTS[name][0]}")
    called = []
    monkeypatch.setattr(module, "run", lambda quick, path: called.append((quick, path)))
    assert run_command(["bench", name, "--quick"]) == 0
    assert called == [(True, None)]


def test_all_runs_every_measurement(monkeypatch):
    called = []
    for module in {module for module, _ in MEASUREMENTS.values()}:
        loaded = importlib.import_module(f"slipstream.bench.{module}")
        monkeypatch.setattr(loaded, "run", lambda quick, path, m=module: called.append(m))
    assert run_command(["bench", "all", "--quick"]) == 0
    assert called == [module for module, _ in MEASUREMENTS.values()]


def test_loading_one_measurement_leaves_the_others_alone(monkeypatch):
    for module, _ in MEASUREMENTS.values():
        monkeypatch.delitem(sys.modules, f"slipstream.bench.{module}", raising=False)
    BenchGroup().load("pointwise")
    loaded = {m for m, _ in MEASUREMENTS.values() if f"slipstream.bench.{m}" in sys.modules}
    assert loaded == {"pointwise_rate"}


@pytest.mark.parametrize("name", COMPARISONS)
def test_a_comparison_says_where_it_went(name, capsys):
    assert run_command(["bench", name, "--json", "x.json"]) == 1
    module = name.replace("-", "_")
    assert f"run: python -m benchmarks.{module} " in capsys.readouterr().err
    assert importlib.util.find_spec(f"benchmarks.{module}") is not None


def test_the_old_name_of_pointwise_is_known(capsys):
    assert run_command(["bench", "neighbours"]) == 1
    assert "run: slipstream bench pointwise" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--json"], ["--json", "--quick"], ["--quick", "--json", "-"]]
)
def test_json_without_a_file_goes_to_standard_output_alone(arguments, capsys):
    assert run_command(arguments, measurement_app(measure, "A demo.")) == 0
    written = json.loads(capsys.readouterr().out)
    assert written["claims"] == {"quick": float("--quick" in arguments)}


def test_json_with_a_file_is_written_there(tmp_path, capsys):
    target = tmp_path / "demo.json"
    assert run_command(["--json", str(target)], measurement_app(measure, "A demo.")) == 0
    assert json.loads(target.read_text())["bench"] == "demo"
    assert "bench demo" in capsys.readouterr().out


def test_the_help_is_the_module_s_own_text(capsys):
    assert run_command(["--help"], measurement_app(measure, "Measures a demo.")) == 0
    assert "Measures a demo." in capsys.readouterr().out
    assert bench_commands.bench.info.help == "Measure this machine: one table a command."
