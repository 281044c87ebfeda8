"""`slipstream ui`: what it refuses; that it serves is tested in tests/system/test_page.py."""

import socket
from pathlib import Path

import pytest

from slipstream.cli.app import run_command
from slipstream.cli.ui_command import _people_of
from slipstream.ui.targets import Targets
from tests.support.run_notes import write_note


@pytest.mark.parametrize(
    ("target", "says"), [("absent", "is no bundle, no run"), (".", "no run and no bundle")]
)
def test_what_cannot_be_shown_is_one_sentence(tmp_path, monkeypatch, capsys, target, says):
    monkeypatch.chdir(tmp_path)
    assert run_command(["ui", target]) == 1
    assert says in capsys.readouterr().err


def test_a_port_in_use_is_one_sentence(tmp_path, capsys):
    write_note(tmp_path / "a" / "run")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert run_command(["ui", str(tmp_path / "a"), "--port", port]) == 1
    assert "choose another --port" in capsys.readouterr().err


def test_the_people_of_a_run_whose_data_are_gone_are_not_known(tmp_path: Path):
    write_note(tmp_path / "films")
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "bundle.json").write_text('{"recipe": {"name": "films"}}')
    found = Targets(bundles={"bundle": tmp_path / "bundle"}, runs=tmp_path)
    assert _people_of(found, None) is None
    assert _people_of(Targets(), None) is None
