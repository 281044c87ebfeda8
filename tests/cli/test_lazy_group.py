"""A lazy group imports the module of the called command and no other."""

import sys
from types import SimpleNamespace
from typing import ClassVar

import pytest
import typer

from slipstream.cli.app import run_command
from slipstream.cli.lazy_group import CommandEntry, LazyGroup, make_command


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Two commands in modules of their own; `blunt` fails when it is imported."""
    (tmp_path / "lazy_sharp.py").write_text("def run(count: int = 2):\n    print('ran', count)\n")
    (tmp_path / "lazy_blunt.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    class Group(LazyGroup):
        entries: ClassVar = {
            "sharp": CommandEntry("lazy_sharp:run", "Cut."),
            "blunt": CommandEntry("lazy_blunt:run", "Do not cut."),
        }
        moved: ClassVar = {"old": "new", "old thing": "new thing"}

    made = typer.Typer(cls=Group, no_args_is_help=True, pretty_exceptions_enable=False)
    made.callback()(lambda: None)
    yield made
    sys.modules.pop("lazy_sharp", None)


def test_only_the_called_module_is_imported(program, capsys):
    assert run_command(["sharp", "--count", "3"], program) == 0
    assert capsys.readouterr().out.strip() == "ran 3"
    assert "lazy_sharp" in sys.modules


def test_the_help_imports_nothing(program, capsys):
    assert run_command(["--help"], program) == 0
    shown = capsys.readouterr().out
    assert "Cut." in shown and "Do not cut." in shown
    assert "lazy_sharp" not in sys.modules


def test_a_failing_import_is_not_hidden(program):
    with pytest.raises(RuntimeError, match="imported"):
        run_command(["blunt"], program)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["old"], "error: 'old' has moved; run: new"),
        (["old", "thing"], "error: 'old thing' has moved; run: new thing"),
        (["old", "other"], "error: 'old' has moved; run: new"),
    ],
)
def test_former_names_are_refused_with_the_new_one(program, words, sentence, capsys):
    assert run_command(words, program) == 1
    assert capsys.readouterr().err.strip() == sentence


def test_functions_and_groups_become_commands_of_the_given_name():
    group = typer.Typer(add_completion=False)
    group.command("first")(lambda: None)
    group.command("second")(lambda: None)
    made = make_command("pair", group)
    assert made.name == "pair" and set(made.commands) == {"first", "second"}
    alone = make_command("alone", lambda: SimpleNamespace())
    assert alone.name == "alone" and not hasattr(alone, "commands")
