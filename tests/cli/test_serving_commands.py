"""What `serve` and `client` refuse before anything starts."""

import pytest

from benchmarks.serving.bundle import random_bundle
from slipstream.cli.app import run_command
from slipstream.cli.serving_commands import read_keys, read_list
from slipstream.errors import SlipstreamError
from slipstream.serving import supervisor

KEY = "a key of sixteen characters or more"


@pytest.fixture
def bundle(tmp_path):
    model = {"kind": "hstu", "dim": 16, "blocks": 1, "heads": 2, "max_len": 64}
    random_bundle(tmp_path / "bundle", model, num_items=3, ids=["a", "b", "c/d"])
    return tmp_path / "bundle"


def test_keys_come_from_a_file_without_its_comments(tmp_path):
    (tmp_path / "keys").write_text(f"# keys\n{KEY}\n\n{KEY} 2\n")
    assert read_keys(tmp_path / "keys") == (KEY, f"{KEY} 2")


def test_keys_come_from_the_environment_otherwise(monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_API_KEY", KEY)
    assert read_keys(None) == (KEY,)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("# nothing\n", "holds no key"),
        (f"{KEY}, two\n", "without commas"),
        (None, "cannot be read"),
    ],
)
def test_a_bad_key_file_is_one_sentence(tmp_path, content, sentence):
    if content is not None:
        (tmp_path / "keys").write_text(content)
    with pytest.raises(SlipstreamError, match=sentence):
        read_keys(tmp_path / "keys")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--host", "0.0.0.0"], "without an API key would serve anybody"),
        (["--long", "1"], "--long needs --long-from"),
        (["--long", "1", "--long-from", "100"], "leaves at least one instance for short"),
    ],
)
def test_serve_refuses_unsafe_or_impossible_flags(bundle, flags, sentence, capsys, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_API_KEY", "")
    assert run_command(["serve", str(bundle), *flags]) == 1
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("history", ["mysql://x", "redis://127.0.0.1:1/0"])
def test_serve_refuses_a_bad_history_store_before_it_starts(bundle, history, capsys, monkeypatch):
    monkeypatch.setattr(supervisor, "Supervisor", None)  # nothing may be started
    assert run_command(["serve", str(bundle), "--history", history]) == 1
    output = capsys.readouterr()
    assert output.err.startswith("error: ") and "serving" not in output.out


def test_serve_refuses_a_damaged_bundle_before_it_starts(bundle, capsys, monkeypatch):
    monkeypatch.setattr(supervisor, "Supervisor", None)
    (bundle / "items.arrow").write_bytes(b"not arrow")
    assert run_command(["serve", str(bundle)]) == 1
    output = capsys.readouterr()
    assert "export the bundle again" in output.err and "serving" not in output.out


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
