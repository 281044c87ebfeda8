"""What `client` reads from the command line, and refuses."""

import pytest

from slipstream.cli.app import run_command
from slipstream.cli.client_inputs import read_list


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("1,2", ["1", "2"]),
        ("RUG/0002-X, -5", ["RUG/0002-X", "-5"]),
        ('["a,b", 7, "c"]', ["a,b", 7, "c"]),
        ("007", ["007"]),
    ],
)
def test_ids_are_read_as_they_are(text, ids):
    assert read_list(text) == ids


@pytest.mark.parametrize("text", ["", "1,,2", "[", "[1.5]", "[]", '[""]', "[null]", "[true]"])
def test_client_refuses_what_are_no_ids(text, capsys):
    assert run_command(["client", "rank", "7", text]) == 1
    assert f"'{text}' is not a list of ids" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--history", "--timestamps"])
def test_client_refuses_a_list_that_is_none(flag, capsys):
    given = ["--history", "1"] if flag == "--timestamps" else []
    assert run_command(["client", "rank", "7", "1", *given, flag, "1,,x"]) == 1
    assert "'1,,x' is not a list of" in capsys.readouterr().err


def test_client_refuses_an_action_without_values(capsys):
    assert run_command(["client", "events", "7", "1", "--actions", "click"]) == 1
    assert "'click' is not an action" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "given", "said"),
    [
        ("events", "surface", "'surface' is no context; write it like surface=home"),
        ("rank", "surface=a,b", "a request has one label of context 'surface', not 2"),
    ],
)
def test_client_refuses_context_that_is_none(command, given, said, capsys):
    assert run_command(["client", command, "7", "1", "--context", given]) == 1
    assert said in capsys.readouterr().err
