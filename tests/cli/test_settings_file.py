"""Flags from a file: by the same names, behind the command line and the environment."""

from pathlib import Path
from typing import Annotated

import pytest
import typer

from slipstream.cli.app import run_command
from slipstream.cli.settings_file import use_settings_file

seen: dict[str, object] = {}
program = typer.Typer(add_completion=False)


@program.command()
def command(
    place: Path,
    deadline_ms: Annotated[float, typer.Option(min=1)] = 1_000.0,
    rate: Annotated[float | None, typer.Option(envvar="TEST_RATE")] = None,
    relay: bool = True,
    check: bool = False,
    settings: Annotated[
        Path | None, typer.Option(is_eager=True, callback=use_settings_file)
    ] = None,
) -> None:
    """A command of a few flags."""
    seen.clear()
    seen.update(place=place, deadline_ms=deadline_ms, rate=rate, relay=relay)


def run(tmp_path: Path, text: str, *words: str) -> int:
    (tmp_path / "file.yaml").write_text(text)
    return run_command(["--settings", str(tmp_path / "file.yaml"), *words], program)


def test_a_file_sets_flags_and_arguments_by_their_names(tmp_path: Path):
    assert run(tmp_path, "place: here\ndeadline-ms: 5\nrate: 2.5\nrelay: false\n") == 0
    assert seen == {"place": Path("here"), "deadline_ms": 5.0, "rate": 2.5, "relay": False}
    assert run(tmp_path, "deadline_ms: 6\nrate: null\n", "there") == 0
    assert seen == {"place": Path("there"), "deadline_ms": 6.0, "rate": None, "relay": True}


def test_the_command_line_and_the_environment_go_before_the_file(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("TEST_RATE", "7")
    text = "place: here\ndeadline-ms: 5\nrate: 2.5\nrelay: false\n"
    assert run(tmp_path, text, "there", "--deadline-ms", "9", "--relay") == 0
    assert seen == {"place": Path("there"), "deadline_ms": 9.0, "rate": 7.0, "relay": True}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("dealine-ms: 3", "unknown key 'dealine-ms' in {file}; did you mean 'deadline-ms'?"),
        ("check: true", "unknown key 'check' in {file}"),
        ("deadline-ms: 0", "'deadline-ms' in {file}: "),
        ("deadline-ms: soon", "'deadline-ms' in {file}: "),
        ("deadline-ms: [1, 2]", "'deadline-ms' in {file} is not one value"),
        ("- 1", "are not lines of `flag: value`"),
        ("1: 2", "are not lines of `flag: value`"),
        ("a: [", "are not YAML"),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path: Path, text: str, sentence: str, capsys):
    assert run(tmp_path, text, "here") == 1
    error = capsys.readouterr().err
    assert sentence.format(file=tmp_path / "file.yaml") in error
    assert error.startswith("error: ") and error.count("\n") == 1


def test_a_file_that_is_not_there_is_one_sentence(tmp_path: Path, capsys):
    assert run_command(["here", "--settings", str(tmp_path / "none.yaml")], program) == 1
    assert "cannot be read: No such file" in capsys.readouterr().err


def test_an_empty_file_changes_nothing(tmp_path: Path):
    assert run(tmp_path, "# nothing yet\n", "here") == 0
    assert seen["deadline_ms"] == 1_000.0
