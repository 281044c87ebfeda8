"""The command line starts without heavy imports, and every error is one sentence."""

import json
import subprocess
import sys

import pytest
import typer

import slipstream
from slipstream.cli.app import COMMANDS, RootGroup, app, run_command
from slipstream.errors import SlipstreamError

HEAVY = ("torch", "numpy", "polars", "pyarrow", "yaml", "matplotlib", "aiohttp")
ASK = """
import json, sys
from slipstream.cli.app import run_command
code = run_command(json.loads(sys.argv[1]))
print(json.dumps([code, sorted(sys.modules)]))
"""


def modules_after(*words: str) -> tuple[int, set[str]]:
    """The exit code of a command in a fresh process, and the modules it loaded."""
    call = [sys.executable, "-c", ASK, json.dumps(words)]
    ended = subprocess.run(call, capture_output=True, text=True, timeout=120, check=True)
    code, modules = json.loads(ended.stdout.splitlines()[-1])
    return code, set(modules)


@pytest.mark.system
@pytest.mark.parametrize("words", ["--help", "--version"])
def test_help_and_version_load_no_heavy_module_and_no_command(words):
    code, modules = modules_after(words)
    assert code == 0
    assert sorted(modules & {*HEAVY, "pydantic"}) == []
    assert not modules & {entry.place.partition(":")[0] for entry in COMMANDS.values()}


@pytest.mark.system
def test_the_help_of_bench_loads_no_measurement():
    code, modules = modules_after("bench", "--help")  # typer itself may load pydantic here
    assert code == 0
    assert sorted(modules & set(HEAVY)) == []
    assert not [name for name in modules if name.startswith("slipstream.bench")]


@pytest.mark.system
def test_a_client_call_loads_no_torch():
    code, modules = modules_after("client", "health", "--url", "http://127.0.0.1:9")
    assert code == 1 and "torch" not in modules


def test_the_version_has_one_source(capsys):
    assert run_command(["--version"]) == 0
    assert capsys.readouterr().out.strip() == slipstream.__version__


@pytest.mark.parametrize("name", COMMANDS)
def test_the_table_shows_the_first_line_of_a_command_s_own_help(name):
    command = RootGroup().load(name)
    assert command.name == name
    assert command.help.partition("\n")[0] == COMMANDS[name].help


def test_the_help_lists_every_command(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert run_command(["--help"]) == 0
    shown = capsys.readouterr().out
    assert not [name for name in COMMANDS if name not in shown]


def test_a_mistyped_command_gets_a_suggestion(capsys):
    assert run_command(["trian"]) == 2
    assert "train" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "replacement"),
    [
        (["study", "staleness", "--quick"], "python -m benchmarks.staleness (from"),
        (["study", "negatives"], "python -m benchmarks.negative_quality (from"),
        (["study"], "python -m benchmarks.staleness, or"),
        (["reproduce", "ml-1m"], "python -m benchmarks.reproduce ml-1m (from"),
    ],
)
def test_a_command_that_has_moved_names_its_replacement(words, replacement, capsys):
    assert run_command(words) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: ") and replacement in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("failure", "code", "message"),
    [
        (SlipstreamError("the file is missing"), 1, "error: the file is missing"),
        (KeyboardInterrupt(), 130, ""),
        (SystemExit(7), 7, ""),
        (SystemExit("text"), 1, ""),
    ],
)
def test_failures_become_an_exit_code_and_a_sentence(failure, code, message, capsys):
    program = typer.Typer(pretty_exceptions_enable=False)

    @program.command()
    def fail() -> None:
        raise failure

    assert run_command([], program) == code
    assert message in capsys.readouterr().err


def test_a_bug_keeps_its_traceback():
    program = typer.Typer(pretty_exceptions_enable=False)

    @program.command()
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_command([], program)


def test_no_arguments_show_the_help(capsys):
    assert run_command([], app) in (0, 2)
    shown = capsys.readouterr()
    assert "Usage" in shown.out + shown.err
