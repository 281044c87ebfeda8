"""What `serve` and `client` refuse before anything starts."""

import pytest

from slipstream.cli.app import run_command
from slipstream.cli.serving_commands import check_bundle, read_keys
from slipstream.errors import SlipstreamError

KEY = "a key of sixteen characters or more"


@pytest.fixture
def bundle(tmp_path):
    (tmp_path / "bundle.json").write_text("{}")
    return tmp_path


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


def test_what_is_no_bundle_is_refused_with_the_way_to_make_one(tmp_path, bundle):
    check_bundle(bundle)
    with pytest.raises(SlipstreamError, match="slipstream export RUN --out"):
        check_bundle(tmp_path / "elsewhere")


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


def test_client_refuses_what_are_no_ids(capsys):
    assert run_command(["client", "rank", "7", "1,two"]) == 1
    assert "'1,two' is not a list of ids" in capsys.readouterr().err


def test_client_refuses_an_action_without_values(capsys):
    assert run_command(["client", "events", "7", "1", "--actions", "click"]) == 1
    assert "'click' is not an action" in capsys.readouterr().err
