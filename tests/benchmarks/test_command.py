"""Every benchmark is a command with the same flags, and errors are one sentence."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from benchmarks import command
from slipstream.errors import SlipstreamError

MEASUREMENTS = (
    *("attack", "auto_schedule", "balance", "before_after", "chaos", "checkpoint", "disk_table"),
    *("exchange", "negatives", "pipeline", "ranking", "recommend", "router", "serving"),
    *("simulate", "startup", "tables"),
)
FOLDER = Path(command.__file__).parent
STUDIES = ("arena", "negative_quality", "reproduce", "staleness")


@pytest.fixture
def help_of(monkeypatch, capsys):
    """What `python -m benchmarks.NAME --help` prints, run in this process."""

    def run(name: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, "--help"])
        monkeypatch.delitem(sys.modules, f"benchmarks.{name}", raising=False)
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(f"benchmarks.{name}", run_name="__main__")
        assert ended.value.code == 0
        return capsys.readouterr().out

    return run


def test_a_benchmark_is_a_module_that_python_runs():
    words = [sys.executable, "-m", "benchmarks.balance", "--help"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert "python -m benchmarks.balance" in ended.stdout


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_a_benchmark_takes_json_and_quick(name, help_of):
    shown = help_of(name)
    assert "--json" in shown and "--quick" in shown


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("negative_quality", ("--out", "--data", "--seeds", "--options", "--epochs")),
        ("reproduce", ("--recipe", "--seeds", "--data", "--out")),
        ("staleness", ("--out", "--data", "--seeds", "--datasets", "--variants", "--jobs")),
    ],
)
def test_a_study_keeps_its_flags(name, flags, help_of):
    shown = help_of(name)
    assert [flag for flag in flags if flag not in shown] == []


def test_the_readme_names_every_benchmark():
    text = (FOLDER / "README.md").read_text()
    assert [name for name in (*MEASUREMENTS, *STUDIES) if f"| `{name}" not in text] == []
    packages = {path.parent.name for path in FOLDER.glob("*/__main__.py")}
    assert packages <= {*MEASUREMENTS, *STUDIES}


def test_a_measurement_exits_with_its_json(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["demo", "--quick", "--json"])
    with pytest.raises(SystemExit) as ended:
        command.run_measurement(lambda quick, path: {"quick": quick}, "A demo.")
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out) == {"quick": True}


def test_an_error_of_a_study_is_one_sentence(monkeypatch, capsys):
    def study(seeds: int = 1) -> None:
        raise SlipstreamError(f"{seeds} seeds are too few")

    monkeypatch.setattr(sys, "argv", ["study", "--seeds", "2"])
    with pytest.raises(SystemExit) as ended:
        command.run_function(study)
    assert ended.value.code == 1
    assert capsys.readouterr().err == "error: 2 seeds are too few\n"
    assert isinstance(command.function_app(study), typer.Typer)
